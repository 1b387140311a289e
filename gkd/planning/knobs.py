"""The settings that save memory, of each group, and what a group needs after some are changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gkd.config import GROUPS, Config, Engine, Pool, Rollout
from gkd.planning.items import GroupMemory
from gkd.planning.memory import memory_of
from gkd.planning.subject import Subject, changed

Value = int | float | bool


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting that saves memory, and the values to try, mildest first."""

    setting: str
    level: int
    values: tuple[Value, ...]


def knobs_of(subject: Subject, group: str) -> list[Knob]:
    """What may be changed for a group, in no order; a setting may be there twice, with values of different levels."""
    section = next(section for section, _ in subject.config.pools() if GROUPS.get(section, section) == group)
    found = _actor_knobs(subject) if group == "actor" else _engine_knobs(subject, section)
    if group in ("actor", *subject.config.on_the_actors_gpus()):
        found = [*found, *_turns(subject)]
    return [knob for knob in found if knob.values]


def _shorter(config: Config) -> list[Knob]:
    prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
    return [
        Knob("rollout.max_response_length", 2, tuple(v for v in (response * 3 // 4, response // 2) if v >= 16)),
        Knob("data.max_prompt_length", 2, tuple(v for v in (prompt * 7 // 8, prompt * 3 // 4) if v >= 16)),
    ]


def _actor_knobs(subject: Subject) -> list[Knob]:
    config = subject.config
    actor, longest = config.actor, subject.work().longest
    tokens = [actor.max_tokens_per_micro_batch >> i for i in range(1, 8)]
    fitting = [*(t for t in tokens if t > longest), longest]
    knobs = [
        Knob("actor.max_tokens_per_micro_batch", 1, tuple(t for t in fitting if t < tokens[0] * 2)),
        Knob("actor.loss_chunk", 1, tuple(actor.loss_chunk >> i for i in (1, 2, 3) if actor.loss_chunk >> i >= 32)),
        Knob("actor.gradient_checkpointing", 1, () if actor.gradient_checkpointing else (True,)),
    ]
    if not subject.card.is_cpu:
        knobs.append(Knob("actor.offload_optimizer", 2, () if actor.offload_optimizer else (True,)))
        knobs.append(_more_gpus(subject))
    ranks = () if config.reference.model.path is not None else (16, 8, 4)  # with adapters it is the student
    r = actor.lora.r
    return [*knobs, *_shorter(config), Knob("actor.lora.r", 3, tuple(v for v in ranks if r is None or v < r))]


def _more_gpus(subject: Subject) -> Knob:
    """GPUs of its nodes that no other group has; further nodes for an actor that has whole ones."""
    config = subject.config
    now, per_node, nnodes = config.trainer.n_gpus_per_node, subject.gpus_per_node, config.trainer.nnodes
    if now >= per_node:
        more = (nnodes << i for i in (1, 2, 3))
        return Knob("trainer.nnodes", 2, tuple(more))
    free = _room(subject, "trainer")
    return Knob("trainer.n_gpus_per_node", 2, tuple(sorted({v for v in (2 * now, 4 * now, free) if now < v <= free})))


def _turns(subject: Subject) -> list[Knob]:
    """Having the memory in turn, where that is ruled out and would be possible."""
    config = subject.config
    possible = config.on_the_actors_gpus() and config.actor.lora.quantize is None and not subject.card.is_cpu
    return [Knob("cluster.offload", 1, (True,))] if possible and config.cluster.offload is False else []


def _room(subject: Subject, section: str) -> int:
    """GPUs of a node that a pool could have: where it may be beside all others, those that these leave.

    0 where it has named or others' GPUs.
    """
    config = subject.config
    if not _moves(config, section):
        return 0
    if len(subject.nodes or ()) > 1:
        return subject.gpus_per_node
    pools, guests = dict(config.pools()), config.hosts()
    own = [name for name in pools if name != section and GROUPS.get(name, name) not in guests]
    return subject.gpus_per_node - sum(pools[name].n_gpus_per_node for name in own)


def _moves(config: Config, section: str) -> bool:
    """Whether a pool takes GPUs where there are some, and not named or others' ones."""
    pool: Pool = getattr(config, section)
    return pool.ranges() is None and GROUPS.get(section, section) not in config.hosts()


def _spans(subject: Subject, section: str, room: int) -> list[int]:
    """Widths of an engine on all GPUs of a node or several, its own, where one on those of fewer does not fit."""
    group, per_node = GROUPS.get(section, section), subject.gpus_per_node
    if not _moves(subject.config, section) or group in subject.config.hosts().values():
        return []
    heads = subject.models.of(group).heads
    widest = max(width for width in range(1, per_node + 1) if per_node % width == heads % width == 0)
    if after(subject, group, {f"{section}.tensor_parallel_size": widest}).fits:
        return [widest] if widest > room else []
    return [nnodes * per_node for nnodes in (2, 4) if heads % (nnodes * per_node) == 0]


def _engine_knobs(subject: Subject, section: str) -> list[Knob]:
    if section == "reward_model":
        rated = subject.config.reward_model.max_num_seqs
        return [Knob("reward_model.max_num_seqs", 1, tuple(rated >> i for i in (1, 2, 3) if rated >> i))]
    engine: Engine = getattr(subject.config, section)
    seqs = tuple(engine.max_num_seqs >> i for i in (1, 2, 3) if engine.max_num_seqs >> i >= 8)
    knobs = [Knob(f"{section}.max_num_seqs", 1, seqs)]
    if subject.card.is_cpu:
        sizes = tuple(v for v in (engine.kv_cache_gb // 2, engine.kv_cache_gb * 2, engine.kv_cache_gb * 4) if v >= 1)
        knobs.append(Knob(f"{section}.n_gpus_per_node", 1, _fewer_engines(subject.config, section, engine)))
        return [*knobs, Knob(f"{section}.kv_cache_gb", 1, sizes), *_shorter(subject.config)]
    share = engine.gpu_memory_utilization
    shared = any(GROUPS.get(section, section) in pair for pair in subject.config.may_share())
    shares = [round(share * part, 3) for part in (1.25, 1.5, 2, 3, 0.8, 0.6, 0.4)] if shared else [0.8, 0.9, 0.95]
    knobs.append(Knob(f"{section}.gpu_memory_utilization", 1, tuple(v for v in shares if v != share and v <= 0.95)))
    knobs.append(Knob(f"{section}.enforce_eager", 1, () if engine.enforce_eager else (True,)))
    if isinstance(engine, Rollout) and engine.engine == "hf":  # has neither shares nor graphs, and runs on one GPU
        return [knobs[0], *_shorter(subject.config)]
    n, room, heads = engine.n_gpus_per_node, _room(subject, section), subject.models.of(section).heads
    now = engine.tensor_parallel_size
    wider = [now << i for i in (1, 2, 3)] if heads % now == 0 else [1, 2, 4, 8]
    widths = [tp for tp in wider if heads % tp == 0]
    knobs.append(Knob(f"{section}.tensor_parallel_size", 1, tuple(tp for tp in widths if n % tp == 0)))
    more = tuple(tp for tp in widths if n % tp and -(-n // tp) * tp <= room)  # of more GPUs
    knobs.append(Knob(f"{section}.tensor_parallel_size", 2, (*more, *_spans(subject, section, room))))
    return [*knobs, *_shorter(subject.config)]


def _fewer_engines(config: Config, section: str, engine: Engine) -> tuple[int, ...]:
    """Simulated GPUs for fewer of them, all in the memory of one machine."""
    halves = (engine.n_gpus_per_node >> i for i in (1, 2, 3))
    return tuple(n for n in halves if n and n % engine.tensor_parallel_size == 0) if _moves(config, section) else ()


def need_of(subject: Subject, group: str) -> GroupMemory:
    """What a group needs as it is."""
    return next(memory for memory in memory_of(subject, group) if memory.group == group)


def after(subject: Subject, group: str, settings: Mapping[str, Value]) -> GroupMemory:
    """What a group needs after changes."""
    return need_of(replace(subject, config=changed(subject.config, complete(subject, settings))), group)


def complete(subject: Subject, settings: Mapping[str, Value]) -> dict[str, Value]:
    """With as many GPUs as wider engines fill, where the pool has not: those of whole nodes for one that spans them."""
    found, per_node = dict(settings), subject.gpus_per_node
    for setting, width in settings.items():
        section, _, name = setting.partition(".")
        if name != "tensor_parallel_size":
            continue
        pool: Engine = getattr(subject.config, section)
        if not (n := pool.n_gpus_per_node) % width:
            continue
        if width <= per_node:
            found[f"{section}.n_gpus_per_node"] = -(-n // int(width)) * int(width)
            continue
        an_engine, now = int(width) // per_node, pool.nnodes if n == per_node else 1
        whole: dict[str, Value] = {"n_gpus_per_node": per_node, "nnodes": -(-now // an_engine) * an_engine}
        whole |= {"across_nodes": True}
        found |= {f"{section}.{key}": value for key, value in whole.items() if getattr(pool, key) != value}
    return found
