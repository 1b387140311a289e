"""Seconds that each stage of a step takes, from operations, bytes and links.

Assumed, and stated because little of it could be measured: matrix products reach ``plan.efficiency`` of a card's
TFLOP/s, reading weights and caches 0.8 of its bandwidth, an engine of several GPUs 0.85 of as many engines of one, and
an engine needs 4 ms a step beside its arithmetic, and 20 us for each sum over nodes. Attention is counted with the mean
context; kernels, sampling and tokenizing are not counted by themselves. tests/planning/test_stages.py holds the
estimates against what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from gkd.config import Engine, Pool
from gkd.planning.actor_memory import F32
from gkd.planning.engine_memory import kv_bytes, sequences_held
from gkd.planning.memory import micro_batch
from gkd.planning.shape import ModelShape
from gkd.planning.subject import Subject

READ_EFFICIENCY, TENSOR_PARALLEL_EFFICIENCY = 0.8, 0.85
ENGINE_STEP_S = 0.004  # of vLLM's own work a step: 512 steps of 128 sequences of a 0.5B model took 2.46 s on an H200
NETWORK_WAIT_S = 20e-6  # until a sum over several nodes begins to arrive
SAVE_BYTES_S, LOAD_BYTES_S = 0.44e9, 1.5e9  # safetensors.torch.save and load, measured on two cores
HOST_LINK, HOST_MEMORY = 25e9, 100e9  # PCIe 4.0 x16 and eight channels of DDR4 in practice, bytes a second
SWITCH_S = 0.02  # of an object store and an engine that stops and starts, measured with small models


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds of each stage of one step, each by itself. ``tail``: what the last sample takes to be scored.

    ``score``, ``reference`` and ``reward`` (of a reward model) are 0 where nobody is asked.
    """

    generate: float
    score: float
    reference: float
    update: float
    sync: float
    tail: float
    reward: float = 0.0


def stages_of(subject: Subject) -> Stages:
    """All stages of a configuration's layout."""
    config = subject.config
    score = reference = tail = reward = 0.0
    pools = dict(config.pools())
    if "teacher" in pools:
        score, tail = score_s(subject, "teacher", config.teacher), tail_s(subject, "teacher", config.teacher)
    if "reference" in pools:
        reference = score_s(subject, "reference", config.reference)
        tail = max(tail, tail_s(subject, "reference", config.reference))
    if "reward_model" in pools:
        reward, last = reward_s(subject, config.reward_model)
        tail = max(tail, last)
    world = config.trainer.n_workers
    return Stages(
        generate_s(subject, config.rollout),
        score,
        reference,
        update_s(subject, world, config.trainer.nnodes),
        sync_s(subject, world),
        tail,
        reward,
    )


def forward_flops(shape: ModelShape, context: float) -> float:
    """Operations of one token through all layers, ``context`` tokens before it on average; the head by itself."""
    return 2 * shape.n_active + 4 * shape.n_layers * shape.heads * shape.head_dim * context


def head_flops(shape: ModelShape) -> float:
    """Operations of one position through the head."""
    return 2.0 * shape.head


def generate_s(subject: Subject, engine: Engine) -> float:
    """Sampling a batch: prompts are computed once each, then every step reads the weights and the caches."""
    work, card, shape, c = subject.work(), subject.card, subject.models.student, subject.compute
    tp = engine.tensor_parallel_size
    rate, reading = _speed(subject, tp)
    sampled = work.samples * subject.config.algorithm.on_policy_share
    each = max(1.0, sampled / (engine.n_engines))
    at_once = min(each, sequences_held(subject, "rollout", engine))
    prefill = each * work.prompts / work.samples * work.prompt * forward_flops(shape, work.prompt / 2) / rate
    context = work.prompt + work.response / 2
    read = c * (shape.n_active if at_once < 4 else shape.n_parameters) + at_once * context * kv_bytes(shape, 1, c)
    computed = at_once * (forward_flops(shape, context) + head_flops(shape)) / rate
    step = (0.0 if card.is_cpu else ENGINE_STEP_S) + max(read / reading, computed)
    step += crossing_s(subject, shape, engine, at_once)
    prefill += crossing_s(subject, shape, engine, each * work.prompts / work.samples * work.prompt)
    return prefill + work.response * step * each / at_once


def crossing_s(subject: Subject, shape: ModelShape, engine: Engine, tokens: float) -> float:
    """What an engine over several nodes waits for the network when ``tokens`` pass through it at once.

    Activations are summed over its GPUs twice a layer: within each of n nodes, and then 2 (n - 1) / n of them cross.
    The gathering of logits is not counted.
    """
    if (n := engine.nodes_an_engine) == 1:
        return 0.0
    sent = 2 * (n - 1) / n * tokens * shape.hidden * subject.compute / subject.card.network
    return 2 * shape.n_layers * (NETWORK_WAIT_S + sent)


def score_s(subject: Subject, group: str, engine: Engine) -> float:
    """Scoring a batch: one pass over every token, the head at each."""
    work = subject.work()
    return max(1.0, work.samples / engine.n_engines) * _score_one(subject, group, engine)


def tail_s(subject: Subject, group: str, engine: Engine) -> float:
    """Scoring the samples that finish last: one by each engine."""
    return _score_one(subject, group, engine)


def reward_s(subject: Subject, pool: Pool) -> tuple[float, float]:
    """What a reward model takes for a batch, and for the samples that finish last: layers alone, it has one output."""
    work, shape = subject.work(), subject.models.of("reward_model")
    length = work.prompt + work.response
    one = length * forward_flops(shape, length / 2) / subject.card.flops
    return max(1.0, work.samples / pool.n_workers) * one, one


def _score_one(subject: Subject, group: str, engine: Engine) -> float:
    work, shape = subject.work(), subject.models.of(group)
    rate, _ = _speed(subject, engine.tensor_parallel_size)
    length = work.prompt + work.response
    computed = length * (forward_flops(shape, length / 2) + head_flops(shape)) / rate
    return computed + crossing_s(subject, shape, engine, length)


def _speed(subject: Subject, tp: int) -> tuple[float, float]:
    """Operations and bytes a second of an engine of ``tp`` GPUs."""
    gain = tp * TENSOR_PARALLEL_EFFICIENCY if tp > 1 else 1.0
    return subject.card.flops * gain, subject.card.bandwidth * READ_EFFICIENCY * gain


def update_s(subject: Subject, world: int, nnodes: int) -> float:
    """All optimizer steps of a batch on ``world`` ranks of ``nnodes`` nodes.

    Forward and both backward products are three passes, four with checkpointing; with an adapter one less. The head
    runs forward twice. Gathering weights (twice) and reducing gradients overlaps with computing a micro-batch.
    """
    work, card, shape, actor = subject.work(), subject.card, subject.models.student, subject.config.actor
    length = work.prompt + work.response
    lora = actor.lora.r is not None
    layers = forward_flops(shape, length / 2) * (3 + actor.gradient_checkpointing - lora)
    head = head_flops(shape) * work.response / length * (3 if lora else 4)
    mini = min(actor.mini_batch_size or work.samples, work.samples)
    n_steps = -(-work.samples // mini)
    each = -(-mini // world) * length  # tokens of a rank
    micro = min(micro_batch(subject, world).tokens, each)
    moved = 0.0 if world == 1 else (2 * subject.compute + (0 if lora else F32)) * shape.n_parameters
    link = card.link if nnodes == 1 else card.network
    a_micro = max(micro * (layers + head) / card.flops, moved / link)
    adam = 0.0 if lora else 7 * F32 * shape.n_parameters / world / (card.bandwidth * READ_EFFICIENCY)
    if actor.offload_optimizer and not card.is_cpu:
        # Weights come over twice and gradients go back once for every micro-batch; the host does the optimizer's step.
        crossing = (2 * subject.compute if lora else 3 * F32) * shape.n_parameters / world
        a_micro = max(a_micro, crossing / HOST_LINK)
        adam = 0.0 if lora else 7 * F32 * shape.n_parameters / world / HOST_MEMORY
    once = each / micro * a_micro + adam
    remembered = 0.0
    remember_reference = subject.config.algorithm.kl.coef > 0 and lora
    for asked in (actor.epochs * n_steps > 1, remember_reference):
        remembered += asked * n_steps * each * (forward_flops(shape, length / 2) + head_flops(shape)) / card.flops
    return actor.epochs * n_steps * once + remembered


def sync_s(subject: Subject, world: int) -> float:
    """New weights: gathered, then serialised and read by every engine at the same time, or from GPU to GPU.

    There they are read and written twice, as they are packed and as they are loaded, and by NCCL go over the link.
    """
    card, n_bytes = subject.card, subject.compute * subject.models.student.n_parameters
    gathered = 0.0 if world == 1 else n_bytes / card.link
    way = transfer(subject)
    if way == "object_store":
        return SWITCH_S + gathered + n_bytes / SAVE_BYTES_S + n_bytes / LOAD_BYTES_S
    sent = n_bytes / (card.link if _on_one_node(subject) else card.network) if way == "nccl" else 0.0
    return SWITCH_S + gathered + 4 * n_bytes / (READ_EFFICIENCY * card.bandwidth) + sent


def transfer(subject: Subject) -> str:
    """The way that weights.transfer will choose (gkd.weights.choice), as far as settings say it."""
    config = subject.config
    if config.weights.transfer != "auto":
        return config.weights.transfer
    if subject.card.is_cpu or config.rollout.engine == "hf":
        return "object_store"
    return "ipc" if "rollout" in config.on_the_actors_gpus() else "nccl"


def _on_one_node(subject: Subject) -> bool:
    trainer, rollout = subject.config.trainer, subject.config.rollout
    return trainer.nnodes == rollout.nnodes == 1 and (
        trainer.n_gpus_per_node + rollout.n_gpus_per_node <= subject.config.plan.gpus_per_node
    )
