"""Seconds of each stage of a step, from operations, bytes and links.

Assumed, and stated because little of it could be measured: matrix products reach ``plan.efficiency`` of a GPU's
TFLOP/s, reading weights and caches 0.8 of its bandwidth, an engine of several GPUs 0.85 of as many engines of one,
and an engine's host 1.8 ms a step and 28 us a sequence, beside the GPU, and 20 us for each sum over nodes. Attention is
counted with the mean context; kernels, sampling and tokenizing are not counted by themselves.
tests/planning/simulation/test_stages.py holds the estimates against what was measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from gkd.config import TRANSFERS, Config, Engine, RewardModel, Scorer
from gkd.config.transfer import passes_worker
from gkd.planning.layout import F32, GPU_EFFICIENCY, Layout, engine_class
from gkd.planning.memory.actor import adapter_weights
from gkd.planning.memory.cache import kv_bytes, state_bytes
from gkd.planning.memory.pools import count_computed, count_concurrent_sequences, tokens_of_full_micro_batch
from gkd.planning.shapes import ModelShape
from gkd.planning.simulation.run import DriverTimes, Pace
from gkd.planning.transfer import transfer_of

READ_EFFICIENCY, TENSOR_PARALLEL_EFFICIENCY = 0.8, 0.85
# What the host does for a step of vLLM's model runner, and for each sequence in its scheduler, beside the GPU, which
# works at the step before. 512 steps of 128 sequences of a 0.5B model took 1.53 s on an H200 and 2.19 s on another
# one's machine. With both in one process, one after the other, it was 2.13 s on the first, and 2.45 s on an H100's.
ENGINE_STEP_S, ENGINE_SEQUENCE_S = 1.8e-3, 28e-6
# What a GPU works at least for a layer in a step of sampling: its kernels are short, and many. With the same model's
# batch sampled ahead a step so took 2.82 and 2.64 s on two machines, where one after the other takes 3.83 and 3.85 s.
LAYER_KERNELS_S = 75e-6
NETWORK_WAIT_S = 20e-6  # until a sum over several nodes begins to arrive
HOST_LINK, HOST_MEMORY = 25e9, 100e9  # PCIe 4.0 x16 and eight channels of DDR4 in practice, bytes a second
LOAD_LAYER_S = 4.5e-3  # of the host, for vLLM to load a layer's tensors: 24 layers took 0.07, 0.13 and 0.14 s
ADAPTER_TOKEN = 1.35  # a token's time where vLLM applies an adapter beside the weights: 1.33 to 1.39 were measured
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
class Factors:
    """Holds measured over planned seconds of each stage, and the run's lengths (None: not measured).

    ``spread`` is the standard deviation of the logarithms of responses' lengths, ``measured_lengths`` are some of
    these. ``driver`` is in seconds as measured, at ``staleness``.
    """

    generate: float = 1.0
    score: float = 1.0
    update: float = 1.0
    sync: float = 1.0
    prompt: int | None = None
    response: int | None = None
    spread: float | None = None
    measured_lengths: tuple[int, ...] = ()
    driver: DriverTimes = field(default_factory=DriverTimes)
    paces: tuple[Pace, ...] = ()
    staleness: int | None = None

    def lengths(self, config: Config) -> Config:
        """Return the configuration with the run's lengths, where it has none of its own."""
        measured: dict[str, float] = {}
        if self.prompt and config.plan.prompt_length is None:
            measured["plan.prompt_length"] = self.prompt
        if self.response and config.plan.response_length is None:
            measured["plan.response_length"] = self.response
            if self.spread is not None:
                measured["plan.response_spread"] = self.spread
        return config.with_settings(measured)

    def apply(self, stages: Stages) -> Stages:
        """Scale planned stages to the measured run."""
        return Stages(
            stages.generate * self.generate,
            stages.score * self.score,
            stages.reference * self.score,
            stages.update * self.update,
            stages.sync * self.sync,
            stages.tail * self.score,
            stages.reward * self.score,
        )


def estimate_step_s(stages: Stages, hosts: Mapping[str, str]) -> float:
    """Return a step's seconds without simulating it, to choose among many layouts: no stragglers, no streaming.

    Sampling, beside which finished samples are scored, then the update, then the new weights. ``hosts`` maps groups to
    the one whose devices they compute on; groups on the same devices work one after the other.
    """
    scorers = {"teacher": stages.score, "reference": stages.reference, "reward_model": stages.reward}
    busy: dict[str, float] = defaultdict(float)  # by the group whose devices they are
    for group, seconds in {"rollout": stages.generate, **scorers}.items():
        busy[hosts.get(group, group)] += seconds
    sampling_on = hosts.get("rollout", "rollout")
    beside = all(hosts.get(group, group) != sampling_on for group, seconds in scorers.items() if seconds)
    return max(busy.values()) + (stages.tail if beside else 0.0) + stages.update + stages.sync


def stages_of(layout: Layout) -> Stages:
    """Return the seconds of all stages of a layout."""
    config, world = layout.config, layout.config.trainer.n_workers
    update = update_s(layout, world, config.trainer.nnodes)
    if config.algorithm.is_supervised:  # engines validate alone
        return Stages(0.0, 0.0, 0.0, update, 0.0, 0.0)
    scorers = {group: pool for group, pool in config.groups().items() if isinstance(pool, Scorer | RewardModel)}
    scored = {group: score_s(layout, group, pool) for group, pool in scorers.items()}
    return Stages(
        generate=generate_s(layout, config.rollout),
        score=scored.get("teacher", 0.0),
        reference=scored.get("reference", 0.0),
        update=update,
        sync=sync_s(layout, world, config.trainer.nnodes),
        tail=max((score_one_s(layout, group, pool) for group, pool in scorers.items()), default=0.0),
        reward=scored.get("reward_model", 0.0),
    )


def forward_flops(shape: ModelShape, context: float) -> float:
    """Count the operations of one token with ``context`` tokens before it through all layers, without the head."""
    attended = shape.mean_context(context)
    summed = 6 * shape.states.n_layers * shape.states.n_summed  # each number is scaled, added to, and read
    return 2 * shape.n_active + 4 * shape.n_layers * shape.heads * shape.head_dim * attended + summed


def head_flops(shape: ModelShape) -> float:
    """Count the operations of one position through the head."""
    return 2.0 * shape.head


def weights_read(shape: ModelShape, n: float) -> float:
    """Count the numbers that a step with ``n`` tokens reads: layers and head, of experts those that any token goes to.

    Each token goes to experts that have nothing to do with the others'.
    """
    layers = (kind.count * w.size * (1 - (1 - w.share) ** n) for kind in shape.layers for w in kind.weights)
    return float(shape.head + sum(layers))


def generate_s(layout: Layout, engine: Engine) -> float:
    """Return the seconds of sampling a batch, all responses of mean length. Prompts are computed once each."""
    workload, each = layout.workload, _sampled_by_engine(layout, engine)
    at_once = min(each, count_concurrent_sequences(layout, "rollout", engine))
    prompts = each * workload.prompts / workload.samples
    return prompts * prefill_s(layout, engine) + workload.response * decode_s(layout, engine, at_once) * each / at_once


def _sampled_by_engine(layout: Layout, engine: Engine) -> float:
    """Count the samples of a batch that an engine draws."""
    return max(1.0, layout.workload.samples * layout.config.algorithm.on_policy_share / engine.n_engines)


def prefill_s(layout: Layout, engine: Engine) -> float:
    """Return the seconds that an engine takes for a prompt."""
    shape, prompt = layout.models.student, layout.workload.prompt
    rate, _ = _engine_speed(layout, engine.tensor_parallel_size)
    return prompt * forward_flops(shape, prompt / 2) / rate + network_s(layout, shape, engine, prompt)


def decode_s(layout: Layout, engine: Engine, n: float) -> float:
    """Return the seconds that an engine takes for the next token of ``n`` responses: it reads weights and caches."""
    tp, adapter = engine.tensor_parallel_size, layout.config.weights.adapter_only
    by_process = ENGINE_STEP_S, n * ENGINE_SEQUENCE_S
    alone = layout.hardware.is_cpu or passes_worker(TRANSFERS.load(transfer_of(layout)), adapter)
    on_host = sum(by_process) if tp == 1 and alone else max(by_process)
    step = max(on_host, _decode_on_device_s(layout, engine, n)) + network_s(layout, layout.models.student, engine, n)
    return step * (ADAPTER_TOKEN if adapter else 1.0)


def _decode_on_device_s(layout: Layout, engine: Engine, n: float) -> float:
    """Return the seconds that the next token of ``n`` responses takes an engine's GPUs, beside which the host works."""
    workload, shape, c = layout.workload, layout.models.student, layout.compute_bytes
    tp, (rate, reading) = engine.tensor_parallel_size, _engine_speed(layout, engine.tensor_parallel_size)
    context = workload.prompt + workload.response / 2
    cache = shape.mean_context(context) * kv_bytes(shape, tp, c) + 2 * state_bytes(shape, tp, c)  # read and written
    read = c * weights_read(shape, n) + n * tp * cache
    return max(read / reading, n * (forward_flops(shape, context) + head_flops(shape)) / rate)


def device_shares(layout: Layout) -> dict[str, float]:
    """Return the parts of the groups' time in which their devices work, those below 1.

    A GPU has time for others while the host works at a step of sampling.
    """
    if layout.hardware.is_cpu:
        return {}
    engine = layout.config.rollout
    n = min(_sampled_by_engine(layout, engine), count_concurrent_sequences(layout, "rollout", engine))
    on_device = max(layout.models.student.n_layers * LAYER_KERNELS_S, _decode_on_device_s(layout, engine, n))
    share = on_device / decode_s(layout, engine, n)
    return {"rollout": share} if share < 1 else {}


def network_s(layout: Layout, shape: ModelShape, engine: Engine, tokens: float) -> float:
    """Return the seconds that an engine over several nodes waits for the network when ``tokens`` pass at once.

    Activations are summed over its GPUs twice a layer: within each of n nodes, and then 2 (n - 1) / n of them cross.
    The gathering of logits is not counted.
    """
    if (n := engine.nodes_an_engine) == 1:
        return 0.0
    sent = 2 * (n - 1) / n * tokens * shape.hidden * layout.compute_bytes / layout.hardware.network
    return 2 * shape.n_layers * (NETWORK_WAIT_S + sent)


def score_s(layout: Layout, group: str, pool: Scorer | RewardModel) -> float:
    """Return the seconds of scoring a batch: one pass over every token."""
    return max(1.0, layout.workload.samples / pool.n_engines) * score_one_s(layout, group, pool)


def score_one_s(layout: Layout, group: str, pool: Scorer | RewardModel) -> float:
    """Return the seconds of scoring one sample, as each engine does last.

    The head is at the response's tokens, or at every one, as the engine's class states. A reward model has one output
    instead.
    """
    shape, workload, length = layout.models.shape_of(group), layout.workload, layout.workload.length
    if isinstance(pool, RewardModel):
        return length * forward_flops(shape, length / 2) / layout.hardware.flops
    kind = engine_class(pool, shape)
    n_rows = length if layout.device in kind.scores_every_token else workload.response
    rate, _ = _engine_speed(layout, pool.tensor_parallel_size)
    if shape.is_dense and not (layout.hardware.is_cpu or pool.enforce_eager):
        rate *= min(kind.compiled_speed, 1 / (layout.config.plan.efficiency or GPU_EFFICIENCY))  # at most the GPU's own
    computed = (length * forward_flops(shape, length / 2) + n_rows * head_flops(shape)) / rate
    return computed + network_s(layout, shape, pool, length)


def _engine_speed(layout: Layout, tp: int) -> tuple[float, float]:
    """Return the operations and the bytes a second of an engine of ``tp`` GPUs."""
    gain = tp * TENSOR_PARALLEL_EFFICIENCY if tp > 1 else 1.0
    return layout.hardware.flops * gain, layout.hardware.bandwidth * READ_EFFICIENCY * gain


def update_s(layout: Layout, world: int, nnodes: int) -> float:
    """Return the seconds of all optimizer steps of a batch on ``world`` ranks of ``nnodes`` nodes.

    Forward and both backward products are three passes, four with checkpointing; with an adapter one less. So are the
    head's, at the tokens of responses, with a forward one more where tokens count by others of their response. Weights
    are gathered and come from the host's memory for forward and
    backward pass, gradients are reduced and go there.
    """
    workload, hardware, shape, actor = layout.workload, layout.hardware, layout.models.student, layout.config.actor
    c, lora, size = layout.compute_bytes, actor.lora.r is not None, actor.copy_size(world)
    mini = min(actor.mini_batch_size or workload.samples, workload.samples)
    n_whole, rest = divmod(workload.samples, mini)
    parts = [(n_whole, mini)] + ([(1, rest)] if rest else [])  # how many updates, of how many samples each
    n_updates = sum(n for n, _ in parts)
    length, full = count_computed(layout, world), tokens_of_full_micro_batch(layout, world)
    a_response = workload.response * forward_flops(shape, workload.prompt + workload.response / 2)
    a_prompt = (length - workload.response) * forward_flops(shape, workload.prompt / 2)
    a_layer_pass = (a_response + a_prompt) / length
    a_head = head_flops(shape) * workload.response
    layers, head = 3 + actor.gradient_checkpointing - lora, 3 + layout.config.algorithm.couples_tokens - lora
    to_and_fro, from_host = 2 * c + (0 if lora else F32), 2 * c if lora else 3 * F32
    once = adam_s(layout, world)
    if not lora:
        once += sum_s(layout, world, nnodes, F32 * shape.n_parameters)

    def pass_s(samples: int, layers: int, heads: int, gathered: float, from_host: float) -> float:
        """``gathered``, ``from_host``: bytes of a parameter that move for every micro-batch."""
        tokens = -(-samples // world) * length
        micro = min(max(full, length), tokens)  # the largest may be longer, and padded
        computed = micro * (layers * a_layer_pass + heads * a_head / length) / hardware.flops
        moved = gather_s(layout, world, nnodes, gathered * shape.n_parameters)
        hosted = actor.offloaded == "weights" and not hardware.is_cpu
        over_host_link = from_host * shape.n_parameters / size / HOST_LINK if hosted else 0.0
        return tokens / micro * max(computed, moved, over_host_link)

    learned = sum(n * pass_s(part, layers, head, to_and_fro, from_host) for n, part in parts) + n_updates * once
    algorithm = layout.config.algorithm
    old_logprobs = actor.epochs * n_updates > 1 and algorithm.weighs_samples
    n_forward = old_logprobs + (algorithm.needs_reference and lora)
    forward = sum(n * pass_s(part, 1, 1, c, c if lora else F32) for n, part in parts) if n_forward else 0.0
    return actor.epochs * learned + n_forward * forward


def gather_s(layout: Layout, world: int, nnodes: int, n_bytes: float) -> float:
    """Return the seconds in which all copies of the student gather ``n_bytes``, or reduce as many to their shards.

    In a ring of a copy's ranks, which are neighbours, all parts but one pass every link. So all but one part of every
    copy that has ranks on a node and elsewhere pass the network of that node.
    """
    size, per_node = layout.config.actor.copy_size(world), world // nnodes
    cut: list[set[int]] = [{end // size} if end % size else set() for end in range(0, world, per_node)]
    n_rings = max(len(before | after) for before, after in pairwise([*cut, set()]))
    return _ring_s(layout, (1 - 1 / size) * n_bytes, n_rings)


def sum_s(layout: Layout, world: int, nnodes: int, n_bytes: float) -> float:
    """Return the seconds in which ``n_bytes`` of gradients, of which ranks have shards, are summed over all copies.

    A ring for each shard is over that rank of every copy, and so over all nodes; all of a shard's parts but one pass
    every link twice. Rings of all shards that a node has pass its network.
    """
    size = layout.config.actor.copy_size(world)
    n_rings = min(size, world // nnodes) if nnodes > 1 else 0
    return _ring_s(layout, 2 * (1 - size / world) * n_bytes / size, n_rings)


def _ring_s(layout: Layout, passed: float, n_rings: int) -> float:
    """Return the seconds of rings that each pass ``passed`` bytes on, ``n_rings`` of them over a node's network."""
    return max(passed / layout.hardware.link, n_rings * passed / layout.hardware.network)


def adam_s(layout: Layout, world: int) -> float:
    """Return the seconds of one optimizer step by itself, which reads and writes its state; an adapter's is nothing."""
    actor, hardware = layout.config.actor, layout.hardware
    if actor.lora.r is not None:
        return 0.0
    size = F32 * layout.models.student.n_parameters / actor.copy_size(world)
    offloaded = None if hardware.is_cpu else actor.offloaded
    if offloaded == "weights":
        return 7 * size / HOST_MEMORY
    on_device = 7 * size / (hardware.bandwidth * READ_EFFICIENCY)
    # Two moments come, and go at the same time.
    return max(on_device, 2 * size / HOST_LINK) if offloaded == "optimizer" else on_device


def sync_s(layout: Layout, world: int, nnodes: int) -> float:
    """Return the seconds of new weights of ``world`` ranks of ``nnodes`` nodes.

    They are gathered, then read by every engine at the same time. Through the host a byte takes what the transfer's
    class states. From GPU to GPU they are read and written twice, as they are packed and as they are loaded, and go
    over the link where engines are not on the actor's GPUs.
    """
    hardware, shape, n_sent = layout.hardware, layout.models.student, layout.models.student.n_parameters
    if layout.config.weights.adapter_only:
        n_sent = round(sum(n * w.shard_size(1) for n, w in adapter_weights(shape, layout.config.actor.lora)))
    n_bytes = layout.compute_bytes * n_sent
    transfer = TRANSFERS.load(transfer_of(layout))
    gathered = gather_s(layout, world, nnodes, n_bytes) if transfer.gathers else 0.0
    if not transfer.gpu_to_gpu:
        return SWITCH_S + gathered + n_bytes * float(transfer.host_byte_s)
    link = hardware.link if _is_on_one_node(layout) else hardware.network
    sent = 0.0 if {"actor", "rollout"} in layout.may_share else n_bytes / link
    loaded = shape.n_layers * LOAD_LAYER_S + 4 * n_bytes / (READ_EFFICIENCY * hardware.bandwidth)
    return SWITCH_S + gathered + loaded + sent


def _is_on_one_node(layout: Layout) -> bool:
    trainer, rollout = layout.config.trainer, layout.config.rollout
    return trainer.nnodes == rollout.nnodes == 1 and (
        trainer.n_gpus_per_node + rollout.n_gpus_per_node <= layout.config.plan.gpus_per_node
    )
