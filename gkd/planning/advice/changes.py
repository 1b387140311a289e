"""The settings that save memory, of each group, and the memory of a group after some are changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gkd.config import GROUP_OF, SECTION_OF, Config, Engine, Pool, RewardModel
from gkd.planning.layout import Layout, engine_class
from gkd.planning.memory.cache import find_width_obstacle
from gkd.planning.memory.colocation import memory_of
from gkd.planning.memory.pools import GroupMemory, slots_of

Value = int | float | bool
LEVEL_NAMES = {
    1: "the same training, slower",
    2: "more GPUs",
    3: "the optimizer elsewhere, or shorter texts",
    4: "weights elsewhere",
    5: "adapters instead of the model",
}
"""What a change costs. Changes of a level go with those of the levels before it, where these are not enough."""


@dataclass(frozen=True, slots=True)
class Change:
    """Names a setting that saves memory, and the values to try, mildest first, at a level of :data:`LEVEL_NAMES`."""

    setting: str
    level: int
    values: tuple[Value, ...]


def overrides(settings: Mapping[str, Value | str | None]) -> str:
    """Return settings as overrides to paste."""
    return " ".join(f"{name}={'null' if value is None else str(value).lower()}" for name, value in settings.items())


def changes_for(layout: Layout, group: str) -> list[Change]:
    """List what may be changed for a group; a setting may be there twice, with values of different levels."""
    section = SECTION_OF[group]
    if group == "actor":
        more_gpus = None if layout.hardware.is_cpu else _offer_gpus(layout)
        changes = actor_changes(layout.config, layout.workload.longest, more_gpus)
    elif isinstance(settings := getattr(layout.config, section), RewardModel):
        n_seqs = settings.max_num_seqs
        changes = [Change(f"{section}.max_num_seqs", 1, tuple(n_seqs >> i for i in (1, 2, 3) if n_seqs >> i))]
    else:
        changes = _engine_changes(layout, section)
    if group in ("actor", *layout.config.groups_on_actor_gpus()):
        changes = [*changes, *_offer_offload(layout)]
    return [change for change in changes if change.values]


def actor_changes(config: Config, longest: int, more_gpus: Change | None) -> list[Change]:
    """List what may be changed for an actor whose longest sequence has ``longest`` tokens; some have no value to try.

    ``more_gpus`` is None on a CPU, whose memory is the host's.
    """
    actor = config.actor
    tokens = [actor.micro_batch_tokens >> i for i in range(1, 8)]
    fitting = [*(t for t in tokens if t > longest), longest]
    changes = [
        Change("actor.max_tokens_per_micro_batch", 1, tuple(t for t in fitting if t < tokens[0] * 2)),
        Change("actor.loss_chunk", 1, tuple(actor.loss_chunk >> i for i in (1, 2, 3) if actor.loss_chunk >> i >= 32)),
        Change("actor.gradient_checkpointing", 1, () if actor.gradient_checkpointing else (True,)),
    ]
    if actor.fsdp_size is not None:
        n_gpus = config.trainer.n_workers
        wider = [size for size in range(actor.fsdp_size + 1, n_gpus + 1) if n_gpus % size == 0]
        changes.append(Change("actor.fsdp_size", 1, tuple(wider)))
    if more_gpus is not None:
        changes.append(Change("actor.offload_optimizer", 3, () if actor.offloaded else (True,)))
        changes.append(Change("actor.offload_weights", 4, () if actor.offload_weights else (True,)))
        changes.append(more_gpus)
    ranks = () if config.reference.model.path is not None else (16, 8, 4)  # with adapters it is the student
    r = actor.lora.r
    return [
        *changes,
        *_shorten_texts(config),
        Change("actor.lora.r", 5, tuple(v for v in ranks if r is None or v < r)),
    ]


def actor_overrides(config: Config, longest: int) -> dict[int, str]:
    """Return what saves memory of the actor, as overrides to paste: the mildest, level by level.

    ``longest`` as in :func:`actor_changes`, which needs no layout.
    """
    more_gpus = Change("trainer.n_gpus_per_node", 2, (2 * config.trainer.n_gpus_per_node,))
    changes = actor_changes(config, longest, more_gpus)
    by_level = {
        level: {change.setting: change.values[0] for change in changes if change.level == level and change.values}
        for level in LEVEL_NAMES
    }
    return {level: overrides(settings) for level, settings in by_level.items() if settings}


def _shorten_texts(config: Config) -> list[Change]:
    """Offer smaller limits of texts, not below the mean lengths that are known."""
    prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
    least = [max(16, mean or 0) for mean in (config.plan.prompt_length, config.plan.response_length)]
    responses = tuple(v for v in (response * 3 // 4, response // 2) if v >= least[1])
    prompts = tuple(v for v in (prompt * 7 // 8, prompt * 3 // 4) if v >= least[0])
    return [
        Change("rollout.max_response_length", 3, responses),
        Change("data.max_prompt_length", 3, prompts),
    ]


def _offer_gpus(layout: Layout) -> Change:
    """Offer GPUs of its nodes that no other group has; further nodes to an actor that has whole ones."""
    trainer, per_node = layout.config.trainer, layout.gpus_per_node
    if (n_gpus := trainer.n_gpus_per_node) >= per_node:
        return Change("trainer.nnodes", 2, tuple(trainer.nnodes << i for i in (1, 2, 3)))
    free = _count_free_gpus(layout, "trainer")
    return Change(
        "trainer.n_gpus_per_node", 2, tuple(sorted({v for v in (2 * n_gpus, 4 * n_gpus, free) if n_gpus < v <= free}))
    )


def _offer_offload(layout: Layout) -> list[Change]:
    """Offer to offload actor and engines in turn, where that is ruled out and would be possible."""
    config = layout.config
    possible = config.groups_on_actor_gpus() and config.actor.lora.quantize is None and not layout.hardware.is_cpu
    return [Change("cluster.offload", 1, (True,))] if possible and config.cluster.offload is False else []


def _count_free_gpus(layout: Layout, section: str) -> int:
    """Count the GPUs of a node that a pool could have: all where it may be alone, else those that the others leave.

    0 where its GPUs are named, or another group's.
    """
    config = layout.config
    if not _takes_any_gpus(config, section):
        return 0
    if len(layout.nodes or ()) > 1:
        return layout.gpus_per_node
    pools, hosts = dict(config.pools()), config.hosts()
    others = [name for name in pools if name != section and GROUP_OF[name] not in hosts]
    return layout.gpus_per_node - sum(pools[name].n_gpus_per_node for name in others)


def _takes_any_gpus(config: Config, section: str) -> bool:
    """Return whether a pool takes GPUs where there are some, and not named or others' ones."""
    pool: Pool = getattr(config, section)
    return pool.ranges() is None and GROUP_OF[section] not in config.hosts()


def _engine_changes(layout: Layout, section: str) -> list[Change]:
    engine: Engine = getattr(layout.config, section)
    over_two = engine.model_copy(update={"tensor_parallel_size": 2})  # what auto is as soon as an engine spans GPUs
    properties = engine_class(over_two, layout.models.shape_of(section))
    slots = slots_of(layout, section, engine)
    seqs = tuple(slots >> i for i in (1, 2, 3) if slots >> i >= 8)
    changes = [Change(f"{section}.max_num_seqs", 1, seqs)]
    if layout.hardware.is_cpu:
        gb = engine.cpu_cache_gb
        sizes = (*(gb >> i for i in range(1, gb.bit_length())), gb * 2, gb * 4)
        changes.append(Change(f"{section}.n_gpus_per_node", 1, _offer_fewer_engines(layout.config, section, engine)))
        if properties.managed_memory:
            changes.append(Change(f"{section}.kv_cache_gb", 1, sizes))
        return [*changes, *_shorten_texts(layout.config)]
    if properties.managed_memory:
        share = engine.gpu_memory_utilization
        colocated = any(section in pair for pair in layout.may_share)
        shares = [round(share * part, 3) for part in (1.25, 1.5, 2, 3, 0.8, 0.6, 0.4)]
        shares = [v for v in (shares if colocated else [0.8, 0.9, 0.95]) if v != share and v <= 0.95]
        changes.append(Change(f"{section}.gpu_memory_utilization", 1, tuple(shares)))
        changes.append(Change(f"{section}.enforce_eager", 1, () if engine.enforce_eager else (True,)))
    if properties.tensor_parallel:
        changes += _widen_engines(layout, section, engine)
    return [*changes, *_shorten_texts(layout.config)]


def _widen_engines(layout: Layout, section: str, engine: Engine) -> list[Change]:
    n, room, shape = engine.n_gpus_per_node, _count_free_gpus(layout, section), layout.models.shape_of(section)
    width = engine.tensor_parallel_size
    wider = [1, 2, 4, 8] if find_width_obstacle(shape, width) else [width << i for i in (1, 2, 3)]
    widths = [tp for tp in wider if not find_width_obstacle(shape, tp)]
    with_more_gpus = tuple(tp for tp in widths if n % tp and -(-n // tp) * tp <= room)
    return [
        Change(f"{section}.tensor_parallel_size", 1, tuple(tp for tp in widths if n % tp == 0)),
        Change(f"{section}.tensor_parallel_size", 2, (*with_more_gpus, *_span_nodes(layout, section, room))),
    ]


def _span_nodes(layout: Layout, section: str, room: int) -> list[int]:
    """List widths of an engine on all GPUs of one node or several, where one on those of fewer does not fit."""
    per_node, shape = layout.gpus_per_node, layout.models.shape_of(section)
    if not _takes_any_gpus(layout.config, section) or section in layout.config.hosts().values():
        return []
    even = (width for width in range(1, per_node + 1) if per_node % width == 0)
    widest = max(width for width in even if not find_width_obstacle(shape, width))
    if memory_with(layout, section, {f"{section}.tensor_parallel_size": widest}).fits:
        return [widest] if widest > room else []
    return [n * per_node for n in (2, 4) if not find_width_obstacle(shape, n * per_node)]


def _offer_fewer_engines(config: Config, section: str, engine: Engine) -> tuple[int, ...]:
    """Offer fewer simulated GPUs, all of which are in the memory of one machine."""
    halves = (engine.n_gpus_per_node >> i for i in (1, 2, 3))
    whole = tuple(n for n in halves if n and n % engine.tensor_parallel_size == 0)
    return whole if _takes_any_gpus(config, section) else ()


def memory_with(layout: Layout, group: str, settings: Mapping[str, Value]) -> GroupMemory:
    """Return the memory of a group after changes."""
    return memory_of(replace(layout, config=layout.config.with_settings(with_gpus(layout, settings))), group)


def with_gpus(layout: Layout, settings: Mapping[str, Value]) -> dict[str, Value]:
    """Return changes with as many GPUs as wider engines fill, where the pool has fewer.

    An engine that spans nodes has whole ones.
    """
    whole, per_node = dict(settings), layout.gpus_per_node
    for setting, width in settings.items():
        section, _, name = setting.partition(".")
        if name != "tensor_parallel_size":
            continue
        pool: Engine = getattr(layout.config, section)
        if not (n := pool.n_gpus_per_node) % width:
            continue
        if width <= per_node:
            whole[f"{section}.n_gpus_per_node"] = -(-n // int(width)) * int(width)
            continue
        an_engine, n_nodes = int(width) // per_node, pool.nnodes if n == per_node else 1
        nodes: dict[str, Value] = {"n_gpus_per_node": per_node, "nnodes": -(-n_nodes // an_engine) * an_engine}
        nodes |= {"across_nodes": True}
        whole |= {f"{section}.{key}": value for key, value in nodes.items() if getattr(pool, key) != value}
    return whole
