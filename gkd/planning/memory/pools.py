"""Memory of a group on GPUs of its own, item by item.

vLLM takes ``gpu_memory_utilization`` of a GPU: weights, the largest activations of a step, CUDA graphs, and all that is
left for the key-value cache. What this project adds lies outside that share (gkd.inference, gkd.weights).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from gkd.config import TRANSFERS, Engine, Pool, RewardModel, Rollout, Scorer
from gkd.config.actor import pack_size
from gkd.config.device import GB, GIB, RESULT_ENTRY_BYTES, EngineLoad
from gkd.errors import ConfigError, one_line
from gkd.modeling.layout import MOST_KEYS
from gkd.planning.layout import F32, Layout, engine_class
from gkd.planning.memory.actor import (
    MicroBatchSize,
    Training,
    checkpoint_bytes,
    count_copied_numbers,
    offloaded_bytes,
    peak_items,
)
from gkd.planning.memory.cache import BLOCK, CacheUse, block_bytes, cache_use, find_width_obstacle, sequence_bytes
from gkd.planning.memory.push import count_received_bytes, count_sent_bytes
from gkd.planning.shapes import ModelShape
from gkd.planning.transfer import transfer_of

CONTEXT = 0.6 * GIB  # CUDA's context with kernels, as seen with such models
COLLECTIVES = 0.5 * GIB  # NCCL's buffers of several ranks
ACTOR_PROCESS = 0.6 * GIB  # the actor's process on a CPU: Python, torch and transformers
ENGINE_PROCESS = 1.2 * GIB  # an engine's: Python, torch and vLLM
FRAGMENTED = 0.05  # of what comes and goes, held by torch's allocator without being used


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Holds the bytes of one GPU of a group at its worst moment (of a CPU: of one worker).

    ``items`` by name, in the order they are shown; ``available``: what the GPU has for them. ``shortage`` states what
    does not fit where that is not the sum. ``notes``: what is worth knowing, such as how many sequences a cache holds.
    ``host``: what is in the host's memory for this GPU.
    """

    group: str
    n_gpus: int
    items: Mapping[str, float]
    available: float
    shortage: str = ""
    notes: tuple[str, ...] = ()
    host: float = 0.0

    @property
    def total(self) -> float:
        """Sum all items."""
        return sum(self.items.values())

    @property
    def margin(self) -> float:
        """Return what is left, negative where it does not fit."""
        return self.available - self.total

    @property
    def fits(self) -> bool:
        """Return whether the group fits."""
        return self.margin >= 0 and not self.shortage


def pool_memory(layout: Layout, group: str, pool: Pool) -> GroupMemory:
    """Return the memory of a group with this pool, on GPUs of its own."""
    if group == "actor":
        return _actor_memory(layout, pool)
    assert isinstance(pool, Rollout | Scorer | RewardModel), "other pools have engines"
    if isinstance(pool, RewardModel) or not engine_class(pool, layout.models.shape_of(group)).managed_memory:
        return _count_unmanaged_memory(layout, group, pool)
    return _cpu_engine_memory(layout, group, pool) if layout.hardware.is_cpu else _engine_memory(layout, group, pool)


def largest_micro_batch(layout: Layout, world: int) -> MicroBatchSize:
    """Return the largest micro-batch of a rank; one sequence is never divided, so it holds at least the longest."""
    workload, actor = layout.workload, layout.config.actor
    samples = _samples_of_rank(layout, world)
    computed = count_computed(layout, world)
    most_keys = MOST_KEYS * actor.micro_batch_tokens
    whole = max(round(samples * computed), workload.longest)
    tokens = min(max(actor.micro_batch_tokens, workload.longest), whole)
    alone = tokens == whole and (samples * workload.length <= most_keys or samples == 1)
    positions = max(1, round(tokens * workload.response / computed))
    keys = max(0, min(tokens * (workload.length / computed - 1), most_keys - tokens))
    if actor.compile is not False and not layout.hardware.is_cpu:  # one longer than the budget is padded beyond it
        tokens = pack_size(tokens, actor.micro_batch_tokens)
    return MicroBatchSize(tokens, positions, workload.top_k, alone=alone, more_keys=round(keys))


def samples_a_prompt(layout: Layout, world: int) -> float:
    """Count the samples of a micro-batch that are computed with one prompt: 1 where each is with its own."""
    workload, actor = layout.workload, layout.config.actor
    if not actor.share_prompts:
        return 1.0
    n = min(workload.samples / workload.prompts, _samples_of_rank(layout, world))
    by_tokens = (actor.micro_batch_tokens - workload.prompt) / workload.response
    held = max(1.0, min(by_tokens, MOST_KEYS * actor.micro_batch_tokens / workload.length) // 1)
    return max(1.0, n / math.ceil(n / held))


def count_computed(layout: Layout, world: int) -> float:
    """Count the tokens that are computed for a sample of mean length, as those of a micro-batch share its prompt."""
    return layout.workload.response + layout.workload.prompt / samples_a_prompt(layout, world)


def tokens_of_full_micro_batch(layout: Layout, world: int) -> float:
    """Return the tokens of a full micro-batch of samples of mean length, which may be full by its keys."""
    budget = layout.config.actor.micro_batch_tokens
    return budget * min(1.0, MOST_KEYS * count_computed(layout, world) / layout.workload.length)


def _samples_of_rank(layout: Layout, world: int) -> int:
    """Count the samples that one of ``world`` ranks has of an update, at most."""
    samples = layout.workload.samples
    return -(-min(layout.config.actor.mini_batch_size or samples, samples) // world)


def _actor_memory(layout: Layout, pool: Pool) -> GroupMemory:
    world, shape, is_cpu, actor = pool.n_workers, layout.models.student, layout.hardware.is_cpu, layout.config.actor
    size = actor.copy_size(world)
    training = Training(layout.config, size, layout.compute_bytes, is_cpu, sharded=False)
    if size > 1 or actor.offload_weights or count_copied_numbers(shape, training) > actor.most_copied(is_cpu):
        training = replace(training, sharded=True)
    micro = largest_micro_batch(layout, world)
    sent = 0.0 if is_cpu else count_sent_bytes(layout)
    items, host = peak_items(shape, training, micro, sent), offloaded_bytes(shape, training)
    if is_cpu:
        overhead = {"process": ACTOR_PROCESS}
    else:
        persistent = sum(items.get(name, 0.0) for name in ("weights", "gradients", "optimizer state"))
        overhead = {
            "context, collectives": CONTEXT + (COLLECTIVES if world > 1 or _joins_engines(layout) else 0),
            "fragmentation": FRAGMENTED * (sum(items.values()) - persistent),
        }
    notes = [f"micro-batches of {micro.tokens:,} tokens, {micro.positions:,} of them responses"]
    if host:
        notes.append(f"{host / GB:.1f} GB of the host's memory for each GPU")
    if layout.config.trainer.save_minutes is not None or layout.config.trainer.save_every is not None:
        copy = checkpoint_bytes(shape, training)
        notes.append(f"{copy / GB:.1f} GB of the host's memory for each rank while a checkpoint is written")
    return GroupMemory("actor", world, items | overhead, layout.hardware.memory, "", tuple(notes), host)


def _engine_memory(layout: Layout, group: str, engine: Engine) -> GroupMemory:
    """Return the memory of one GPU of a vLLM engine."""
    shape, gpu = layout.models.shape_of(group), layout.hardware
    c, tp = layout.compute_bytes, engine.tensor_parallel_size
    weights, kind = _engine_weights(shape, engine, c) / tp, engine_class(engine, shape)
    slots, managed = slots_of(layout, group, engine), kind.managed_memory
    step, graphs = _step_activations(shape, engine, slots, gpu.memory, c), _process_bytes(shape, engine)
    share_left, gb = _share_left(layout, group, engine, slots), engine.kv_cache_gb
    cache = share_left if gb is None else float(gb * GIB)
    items = {
        "weights": weights,
        "activations of a step": step,
        "context, CUDA graphs": graphs,
        "key-value cache": max(0.0, cache),
    }
    if tp > 1:
        items["collectives"] = COLLECTIVES  # there before vLLM takes its share
    if share_left > cache:
        items["rest of its share"] = share_left - cache  # vLLM does not start where others have it
    longest = layout.workload.longest
    if isinstance(engine, Scorer):
        rows = min(managed.prompt_rows, longest)
        items["logits of prompt rows"] = float(rows * shape.vocabulary * (c + 2 * F32))
        k = _largest_top_k(layout, group, shape)
        limited = kind.batched_tokens(shape.vocabulary, engine.model_copy(update={"max_top_k": k}), "cuda")
        tokens = managed.by_size(managed.step_tokens, gpu.memory) if limited is None else limited
        items["top K of prompt rows"] = float(kind.top_k_bytes(tokens, k))
    else:
        items["weights being received"] = count_received_bytes(layout, tp) + (
            COLLECTIVES if _joins_engines(layout) else 0
        )
    use = _use_of(layout, group, engine, longest)
    n_held = use.count_in(cache)
    shortage = find_width_obstacle(shape, tp)
    if not shortage and n_held < 1:
        shortage = f"{(use.first - cache) / GB:.1f} GB short of one sequence's cache"
    return GroupMemory(group, engine.n_workers, items, gpu.memory, shortage, _cache_notes(n_held, longest, slots))


def _joins_engines(layout: Layout) -> bool:
    """Return whether the actor and all engines are ranks of one group, which new weights are sent over."""
    return bool(TRANSFERS.load(transfer_of(layout)).collective)


def _engine_weights(shape: ModelShape, engine: Engine, c: int) -> float:
    """Return the bytes of a model's weights, of layers that are quantized by the bits that the class states."""
    method = engine.quantization if isinstance(engine, Scorer) else None
    bits = (engine_class(engine, shape).quantized_bits(method) if method else None) or 8 * c
    matrices = sum(kind.count * w.size for kind in shape.layers for w in kind.weights if w.linear or w.share < 1)
    return float(c * (shape.n_parameters - matrices) + matrices * bits / 8)


def _cpu_engine_memory(layout: Layout, group: str, engine: Engine) -> GroupMemory:
    """Return the memory of one vLLM engine on a CPU."""
    shape, workload, c = layout.models.shape_of(group), layout.workload, layout.compute_bytes
    items = {
        "weights": _engine_weights(shape, engine, c),
        "key-value cache": float(engine.cpu_cache_gb * GIB),
        "process": ENGINE_PROCESS,
    }
    if isinstance(engine, Scorer):
        kind = engine_class(engine, shape)
        tokens = kind.batched_tokens(shape.vocabulary, engine, "cpu")
        assert tokens is not None, "on a CPU a step is always limited"
        n_rows = min(tokens, engine.slots * workload.longest)
        items["logits"] = float(2 * n_rows * shape.vocabulary * F32)
        running = min(engine.slots, workload.samples)
        top_k = _largest_top_k(layout, group, shape)
        items["results"] = float(min(kind.result_bytes, running * workload.longest * (top_k + 1) * RESULT_ENTRY_BYTES))
    n_held = cache_use(shape, 1, c, workload.longest, workload.longest, block=1).count_in(engine.cpu_cache_gb * GIB)
    shortage = find_width_obstacle(shape, engine.tensor_parallel_size)
    if not shortage and not n_held:
        shortage = f"kv_cache_gb={engine.cpu_cache_gb} holds no sequence of {workload.longest:,} tokens"
    notes = _cache_notes(n_held, workload.longest, engine.slots)
    return GroupMemory(group, engine.n_workers, items, layout.hardware.memory, shortage, notes)


def _count_unmanaged_memory(layout: Layout, group: str, engine: Rollout | Scorer | RewardModel) -> GroupMemory:
    """Return what the class of the engines counts, and the process."""
    shape, workload = layout.models.shape_of(group), layout.workload
    longest = min(engine.max_model_len, workload.longest) if isinstance(engine, RewardModel) else workload.longest
    load = EngineLoad(
        device=layout.device,
        n_parameters=shape.n_parameters,
        head=shape.head,
        tied=shape.tied,
        hidden=shape.hidden,
        vocabulary=shape.vocabulary,
        dtype_bytes=layout.compute_bytes,
        kv_bytes=math.ceil(sequence_bytes(shape, 1, layout.compute_bytes, longest) / longest),
        pass_bytes=_pass_bytes(shape, layout.compute_bytes),
        n_sequences=min(engine.slots, workload.samples) if isinstance(engine, Rollout) else engine.max_num_seqs,
        longest=longest,
        # At most, where all samples of a prompt are scored together.
        scored=workload.response / (workload.response + workload.prompt * workload.prompts / workload.samples),
        top_k=_largest_top_k(layout, group, shape),
    )
    on_cpu = ENGINE_PROCESS if isinstance(engine, Rollout) else ACTOR_PROCESS
    kind = engine_class(engine, shape)
    counted = kind.memory(load)  # of a class of the user's, anything
    if not _is_bytes_by_item(counted):
        raise ConfigError(
            f"{group}.engine: {kind.__name__}.memory() is to return bytes by item, such as {{'weights': 2.5e9}}, "
            f"and returns {one_line(repr(counted))}"
        )
    items = {**counted, "process": on_cpu if layout.hardware.is_cpu else CONTEXT}
    return GroupMemory(group, engine.n_workers, items, layout.hardware.memory)


def _is_bytes_by_item(counted: Any) -> bool:
    return isinstance(counted, Mapping) and all(
        isinstance(name, str) and isinstance(size, Real) and 0 <= float(size) < math.inf
        for name, size in counted.items()
    )


def _pass_bytes(shape: ModelShape, c: int) -> int:
    """Return the bytes of a token in a forward pass that keeps no activations: in a feed-forward part or attention."""
    return c * max(4 * shape.hidden + 3 * shape.widest_mlp, 10 * shape.hidden)


def count_concurrent_sequences(layout: Layout, group: str, engine: Engine) -> int:
    """Count the sequences of mean length that an engine runs at a time: its cache's, at most its slots."""
    cache = pool_memory(layout, group, engine).items.get("key-value cache", 0.0)
    return max(1, min(slots_of(layout, group, engine), _n_held(layout, group, engine, cache)))


def _n_held(layout: Layout, group: str, engine: Engine, cache: float) -> int:
    """Count the sequences of mean length that ``cache`` bytes hold."""
    return _use_of(layout, group, engine, layout.workload.length).count_in(cache)


def _use_of(layout: Layout, group: str, engine: Engine, length: int) -> CacheUse:
    """Return what sequences of ``length`` tokens take of an engine's cache, in whole blocks."""
    shape, tp, c = layout.models.shape_of(group), engine.tensor_parallel_size, layout.compute_bytes
    managed = engine_class(engine, shape).managed_memory
    if managed is None:
        rounded = -(-length // BLOCK) * BLOCK
        each = sequence_bytes(shape, tp, c, rounded)
        return CacheUse(each, each)
    on_gpu: int = managed.by_size(managed.step_tokens, layout.hardware.memory)
    return cache_use(shape, tp, c, length, length if layout.hardware.is_cpu else on_gpu)


def slots_of(layout: Layout, group: str, engine: Engine) -> int:
    """Return the sequences that an engine may run at a time: ``max_num_seqs``, or what is planned where that is null.

    That is as many as the schedule gives an engine, vLLM's own limit, and what the cache holds of sequences of mean
    length: of more, vLLM would throw caches away and compute them once more. But 128 at least: a mean length that is
    not known is taken to be the limit, and is far less than that where responses are long.
    """
    shape, gpu = layout.models.shape_of(group), layout.hardware
    managed = engine_class(engine, shape).managed_memory
    if engine.max_num_seqs is not None or gpu.is_cpu or managed is None:
        return engine.slots
    ahead = layout.workload.samples * (1 + layout.config.schedule.max_staleness)
    most: int = managed.by_size(managed.max_num_seqs, gpu.memory)
    n_slots = min(most, max(engine.slots, -(-ahead // engine.n_engines)))
    cache = _cache_bytes(layout, group, engine, n_slots)
    return min(n_slots, max(engine.slots, _n_held(layout, group, engine, cache)))


def cache_gb_of(layout: Layout, group: str, engine: Engine) -> int | None:
    """Return the GiB of an engine's cache: ``kv_cache_gb``, or what is planned where that is null; None: what is left.

    A sampler of a small model is left millions of blocks of 16 tokens, and vLLM goes through all of them whenever the
    cache is forgotten, as for new weights. It then gets twice what its sequences can fill, where that is certain.
    """
    shape, c = layout.models.shape_of(group), layout.compute_bytes
    managed = engine_class(engine, shape).managed_memory
    samples_on_gpu = group == "rollout" and not layout.hardware.is_cpu
    if engine.kv_cache_gb is not None or managed is None or not (samples_on_gpu and shape.is_exact):
        return engine.kv_cache_gb
    slots, a_block = slots_of(layout, group, engine), block_bytes(shape, engine.tensor_parallel_size, c)
    left = _cache_bytes(layout, group, engine, slots)
    gb = -(-_use_of(layout, group, engine, layout.workload.longest).bytes_of(2 * slots) // GIB)
    return gb if left > max(gb * GIB, managed.most_blocks * a_block) else None


def _cache_bytes(layout: Layout, group: str, engine: Engine, slots: int) -> float:
    """Return the bytes of the cache: ``kv_cache_gb``, or all that is left where that is null."""
    gb = engine.kv_cache_gb
    return _share_left(layout, group, engine, slots) if gb is None else float(gb * GIB)


def _share_left(layout: Layout, group: str, engine: Engine, slots: int) -> float:
    """Return what vLLM's share of a GPU leaves for the cache, negative where it is too small for the rest."""
    shape, c, memory = layout.models.shape_of(group), layout.compute_bytes, layout.hardware.memory
    used_bytes = _engine_weights(shape, engine, c) / engine.tensor_parallel_size
    used_bytes += _step_activations(shape, engine, slots, memory, c) + _process_bytes(shape, engine)
    return engine.gpu_memory_utilization * memory - used_bytes


def _process_bytes(shape: ModelShape, engine: Engine) -> float:
    return CONTEXT + float(0 if engine.enforce_eager else engine_class(engine, shape).managed_memory.graphs)


def _step_activations(shape: ModelShape, engine: Engine, slots: int, memory: float, c: int) -> float:
    """Return the bytes of the largest step that vLLM measures itself with: its default tokens, and sampling."""
    a_token = c * (3 * shape.hidden + 3 * shape.widest_mlp / engine.tensor_parallel_size)
    managed = engine_class(engine, shape).managed_memory
    step_tokens: int = managed.by_size(managed.step_tokens, memory)
    return step_tokens * a_token + slots * shape.vocabulary * (c + 2 * F32)


def _largest_top_k(layout: Layout, group: str, shape: ModelShape) -> int:
    """Return the largest K of any request that a group that scores gets."""
    in_validation = min(layout.config.data.val_top_k, shape.vocabulary)
    return max(layout.workload.top_k, in_validation) if group == "teacher" else 0


def _cache_notes(n_held: int, longest: int, slots: int) -> tuple[str, ...]:
    text = f"the cache holds {n_held:,} sequences of {longest:,} tokens; max_num_seqs={slots}"
    return (text if n_held >= slots else f"{text}: long ones would wait",)
