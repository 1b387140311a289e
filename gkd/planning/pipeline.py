"""Seconds of each stage of a step, from operations, bytes and links; and of the step that they make together.

Assumed, and stated because little of it could be measured: matrix products reach ``plan.efficiency`` of a GPU's
TFLOP/s, reading weights and caches 0.8 of its bandwidth, an engine of several GPUs 0.85 of as many engines of one, and
an engine needs 4 ms a step beside its arithmetic, and 20 us for each sum over nodes. Attention is counted with the mean
context; kernels, sampling and tokenizing are not counted by themselves. tests/planning/test_pipeline.py holds the
estimates against what was measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from gkd.config import TRANSFERS, Engine, Pool
from gkd.planning.layout import F32, Layout, engine_class
from gkd.planning.memory import concurrent_sequences, kv_bytes, largest_micro_batch
from gkd.planning.shapes import ModelShape
from gkd.weights.choice import choose

READ_EFFICIENCY, TENSOR_PARALLEL_EFFICIENCY = 0.8, 0.85
ENGINE_STEP_S = 0.004  # of vLLM's own work a step: 512 steps of 128 sequences of a 0.5B model took 2.46 s on an H200
NETWORK_WAIT_S = 20e-6  # until a sum over several nodes begins to arrive
SAVE_BYTES_S, LOAD_BYTES_S = 0.44e9, 1.5e9  # safetensors.torch.save and load, measured on two cores
HOST_LINK, HOST_MEMORY = 25e9, 100e9  # PCIe 4.0 x16 and eight channels of DDR4 in practice, bytes a second
SWITCH_S = 0.02  # of an object store and an engine that stops and starts, measured with small models


@dataclass(frozen=True, slots=True)
class Stages:
    """Holds the seconds of each stage of one step, each by itself; ``tail``: of scoring the samples that finish last.

    ``score``, ``reference`` and ``reward`` (of a reward model) are 0 where there is no such group.
    """

    generate: float
    score: float
    reference: float
    update: float
    sync: float
    tail: float
    reward: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """Describes one step in the long run. ``busy`` seconds of each group; ``bound``: the group that sets the pace."""

    staleness: int
    seconds: float
    busy: dict[str, float]
    bound: str

    @property
    def waits(self) -> dict[str, float]:
        """Return the seconds of a step that each group has nothing to do."""
        return {group: max(0.0, self.seconds - busy) for group, busy in self.busy.items()}


def simulate_step(stages: Stages, staleness: int, hosts: Mapping[str, str] | None = None) -> Step:
    """Return a step at ``schedule.max_staleness``.

    0: sampling, beside which finished samples are scored, then the update, then the new weights.
    1: the next batch is sampled and scored while this one is trained on; engines and actor stop for new weights.
    2 and more: a further batch is under way, so that nobody waits for the last samples to be scored.
    ``hosts`` maps groups to the one whose devices they compute on; groups on the same devices work one after the other.
    """
    scorers = {"teacher": stages.score, "reference": stages.reference, "reward_model": stages.reward}
    scorers = {name: seconds for name, seconds in scorers.items() if seconds}
    sampling = {"rollout": stages.generate, **scorers}
    busy = {"actor": stages.update + stages.sync, "rollout": stages.generate + stages.sync, **scorers}
    device_of = {group: (hosts or {}).get(group, group) for group in busy}
    on_other_devices = all(device_of[name] != device_of["rollout"] for name in scorers)
    sampled = max(_sum_by_device(sampling, device_of).values()) + (stages.tail if on_other_devices else 0.0)
    occupied = _sum_by_device(busy, device_of)
    if device_of["actor"] == device_of["rollout"]:
        occupied[device_of["actor"]] -= stages.sync  # which both take part in
    if staleness == 0:
        seconds = sampled + stages.update + stages.sync
    elif staleness == 1:
        seconds = max(sampled + stages.sync, *occupied.values())
    else:
        seconds = max(occupied.values())
    return Step(staleness, seconds, busy, max(busy, key=lambda group: busy[group]))


def _sum_by_device(seconds: Mapping[str, float], device_of: Mapping[str, str]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for group, own in seconds.items():
        sums[device_of[group]] += own
    return sums


def stages_of(layout: Layout) -> Stages:
    """Return the seconds of all stages of a layout."""
    config = layout.config
    score = reference = tail = reward = 0.0
    pools = dict(config.pools())
    if "teacher" in pools:
        score, tail = score_s(layout, "teacher", config.teacher), score_one_s(layout, "teacher", config.teacher)
    if "reference" in pools:
        reference = score_s(layout, "reference", config.reference)
        tail = max(tail, score_one_s(layout, "reference", config.reference))
    if "reward_model" in pools:
        reward, reward_tail = reward_s(layout, config.reward_model)
        tail = max(tail, reward_tail)
    world = config.trainer.n_workers
    if config.algorithm.supervised:  # engines validate alone
        return Stages(0.0, 0.0, 0.0, update_s(layout, world, config.trainer.nnodes), 0.0, 0.0)
    return Stages(
        generate_s(layout, config.rollout),
        score,
        reference,
        update_s(layout, world, config.trainer.nnodes),
        sync_s(layout, world),
        tail,
        reward,
    )


def forward_flops(shape: ModelShape, context: float) -> float:
    """Count the operations of one token with ``context`` tokens before it through all layers, without the head."""
    return 2 * shape.n_active + 4 * shape.n_layers * shape.heads * shape.head_dim * context


def head_flops(shape: ModelShape) -> float:
    """Count the operations of one position through the head."""
    return 2.0 * shape.head


def generate_s(layout: Layout, engine: Engine) -> float:
    """Return the seconds of sampling a batch.

    Prompts are computed once each; then every step reads the weights and the caches.
    """
    workload, hardware, shape, c = layout.workload(), layout.hardware, layout.models.student, layout.compute_bytes
    rate, reading = _engine_speed(layout, engine.tensor_parallel_size)
    sampled = workload.samples * layout.config.algorithm.on_policy_share
    each = max(1.0, sampled / (engine.n_engines))
    at_once = min(each, concurrent_sequences(layout, "rollout", engine))
    prefill = each * workload.prompts / workload.samples * workload.prompt
    prefill = prefill * forward_flops(shape, workload.prompt / 2) / rate
    context = workload.prompt + workload.response / 2
    read = c * (shape.n_active if at_once < 4 else shape.n_parameters) + at_once * context * kv_bytes(shape, 1, c)
    computed = at_once * (forward_flops(shape, context) + head_flops(shape)) / rate
    step = (0.0 if hardware.is_cpu else ENGINE_STEP_S) + max(read / reading, computed)
    step += network_s(layout, shape, engine, at_once)
    prefill += network_s(layout, shape, engine, each * workload.prompts / workload.samples * workload.prompt)
    return prefill + workload.response * step * each / at_once


def network_s(layout: Layout, shape: ModelShape, engine: Engine, tokens: float) -> float:
    """Return the seconds that an engine over several nodes waits for the network when ``tokens`` pass at once.

    Activations are summed over its GPUs twice a layer: within each of n nodes, and then 2 (n - 1) / n of them cross.
    The gathering of logits is not counted.
    """
    if (n := engine.nodes_an_engine) == 1:
        return 0.0
    sent = 2 * (n - 1) / n * tokens * shape.hidden * layout.compute_bytes / layout.hardware.network
    return 2 * shape.n_layers * (NETWORK_WAIT_S + sent)


def score_s(layout: Layout, group: str, engine: Engine) -> float:
    """Return the seconds of scoring a batch: one pass over every token."""
    return max(1.0, layout.workload().samples / engine.n_engines) * score_one_s(layout, group, engine)


def score_one_s(layout: Layout, group: str, engine: Engine) -> float:
    """Return the seconds of scoring one sample, as each engine does last.

    vLLM has the head at every token, the torch engine at those of the response.
    """
    shape, workload = layout.models.of(group), layout.workload()
    length, every_row = workload.length, engine_class(engine, shape).managed_memory
    n_rows = length if every_row else workload.response
    rate, _ = _engine_speed(layout, engine.tensor_parallel_size)
    computed = (length * forward_flops(shape, length / 2) + n_rows * head_flops(shape)) / rate
    return computed + network_s(layout, shape, engine, length)


def reward_s(layout: Layout, pool: Pool) -> tuple[float, float]:
    """Return the seconds that a reward model takes for a batch, and for one sample: layers alone, it has one output."""
    workload, shape = layout.workload(), layout.models.of("reward_model")
    one = workload.length * forward_flops(shape, workload.length / 2) / layout.hardware.flops
    return max(1.0, workload.samples / pool.n_workers) * one, one


def _engine_speed(layout: Layout, tp: int) -> tuple[float, float]:
    """Return the operations and the bytes a second of an engine of ``tp`` GPUs."""
    gain = tp * TENSOR_PARALLEL_EFFICIENCY if tp > 1 else 1.0
    return layout.hardware.flops * gain, layout.hardware.bandwidth * READ_EFFICIENCY * gain


def update_s(layout: Layout, world: int, nnodes: int) -> float:
    """Return the seconds of all optimizer steps of a batch on ``world`` ranks of ``nnodes`` nodes.

    Forward and both backward products are three passes, four with checkpointing; with an adapter one less. The head
    runs forward twice. Gathering weights (twice) and reducing gradients overlaps with computing a micro-batch.
    """
    workload, hardware, shape, actor = layout.workload(), layout.hardware, layout.models.student, layout.config.actor
    length, lora = workload.length, actor.lora.r is not None
    layers = forward_flops(shape, length / 2) * (3 + actor.gradient_checkpointing - lora)
    head = head_flops(shape) * workload.response / length * (3 if lora else 4)
    mini = min(actor.mini_batch_size or workload.samples, workload.samples)
    n_steps = -(-workload.samples // mini)
    each = -(-mini // world) * length  # tokens of a rank
    micro = min(largest_micro_batch(layout, world).tokens, each)
    moved = 0.0 if world == 1 else (2 * layout.compute_bytes + (0 if lora else F32)) * shape.n_parameters
    link = hardware.link if nnodes == 1 else hardware.network
    a_micro = max(micro * (layers + head) / hardware.flops, moved / link)
    adam = 0.0 if lora else 7 * F32 * shape.n_parameters / world / (hardware.bandwidth * READ_EFFICIENCY)
    if actor.offload_optimizer and not hardware.is_cpu:
        # Weights come over twice and gradients go back once for every micro-batch; the host does the optimizer's step.
        over_host_link = (2 * layout.compute_bytes if lora else 3 * F32) * shape.n_parameters / world
        a_micro = max(a_micro, over_host_link / HOST_LINK)
        adam = 0.0 if lora else 7 * F32 * shape.n_parameters / world / HOST_MEMORY
    once = each / micro * a_micro + adam
    a_forward = n_steps * each * (forward_flops(shape, length / 2) + head_flops(shape)) / hardware.flops
    old_logprobs = a_forward if actor.epochs * n_steps > 1 else 0.0
    reference_logprobs = a_forward if layout.config.algorithm.kl.coef > 0 and lora else 0.0
    return actor.epochs * n_steps * once + (old_logprobs + reference_logprobs)


def sync_s(layout: Layout, world: int) -> float:
    """Return the seconds of new weights: gathered, then read by every engine at the same time.

    Through the object store they are serialised and loaded. From GPU to GPU they are read and written twice, as they
    are packed and as they are loaded, and go over the link where engines are not on the actor's GPUs.
    """
    hardware, n_bytes = layout.hardware, layout.compute_bytes * layout.models.student.n_parameters
    gathered = 0.0 if world == 1 else n_bytes / hardware.link
    if not TRANSFERS.load(transfer_of(layout)).gpu_to_gpu:
        return SWITCH_S + gathered + n_bytes / SAVE_BYTES_S + n_bytes / LOAD_BYTES_S
    link = hardware.link if _on_one_node(layout) else hardware.network
    sent = 0.0 if "rollout" in layout.config.on_the_actors_gpus() else n_bytes / link
    return SWITCH_S + gathered + 4 * n_bytes / (READ_EFFICIENCY * hardware.bandwidth) + sent


def transfer_of(layout: Layout) -> str:
    """Return the weight transfer of a run: ``weights.transfer``, or what ``auto`` chooses for workers so placed."""
    config, is_cpu = layout.config, layout.hardware.is_cpu
    if config.weights.transfer != "auto":
        return config.weights.transfer
    colocated = is_cpu or "rollout" in config.on_the_actors_gpus()
    device = "cpu" if is_cpu else "cuda"
    actor, rollout = _Worker(device, ["GPU-0"]), _Worker(device, ["GPU-0" if colocated else "GPU-1"])
    return choose(config.weights, config.rollout, [actor], [rollout])


@dataclass(frozen=True)
class _Worker:
    """Places a worker that is only planned (:class:`gkd.weights.transfer.Place`)."""

    device: str
    gpu_uuids: list[str]


def _on_one_node(layout: Layout) -> bool:
    trainer, rollout = layout.config.trainer, layout.config.rollout
    return trainer.nnodes == rollout.nnodes == 1 and (
        trainer.n_gpus_per_node + rollout.n_gpus_per_node <= layout.config.plan.gpus_per_node
    )
