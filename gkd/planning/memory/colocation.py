"""Memory of all groups of a layout beside each other: what those on one GPU leave each other, and who is offloaded."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from gkd.config import Config
from gkd.config.actor import MICRO_BATCH_TOKENS
from gkd.planning.layout import Layout
from gkd.planning.memory.pools import GroupMemory, pool_memory
from gkd.planning.memory.push import count_sent_bytes

Shared: TypeAlias = set[frozenset[str]]
"""Pairs of groups that may be on the same GPU."""
ROOM = 0.2
"""Share of what an actor's GPU has for it that is left free by micro-batches larger than they need be."""


def all_memory(layout: Layout, only: str | None = None) -> list[GroupMemory]:
    """Return every group's memory, in the order GPUs are handed out.

    With ``only``, groups that do not bear on that one may be left out. On a CPU each group has what the others leave of
    the machine's memory. On a GPU it has what those on the same GPU leave: all that these take, or, where the actor and
    its engines are offloaded in turn, what they keep while they are.
    """
    pools = layout.config.groups()
    if not layout.hardware.is_cpu:
        shared = layout.may_share
        if only is not None:
            pools = {group: pool for group, pool in pools.items() if group == only or {group, only} in shared}
        groups = [pool_memory(layout, group, pool) for group, pool in pools.items()]
        offload = _needs_offload(layout, groups, shared)
        if offload and {"actor", "rollout"} in shared:
            groups = [_with_weight_sync(layout, group, groups) if group.group == "actor" else group for group in groups]
        return [replace(group, available=_available_bytes(layout, group, groups, shared, offload)) for group in groups]
    groups = [pool_memory(layout, group, pool) for group, pool in pools.items()]
    totals = [group.total * group.n_gpus / pool.width for group, pool in zip(groups, pools.values(), strict=True)]
    return [replace(group, available=layout.hardware.memory - sum(totals) + group.total) for group in groups]


def memory_of(layout: Layout, group: str) -> GroupMemory:
    """Return the memory of one group."""
    return next(memory for memory in all_memory(layout, group) if memory.group == group)


def groups_that_do_not_fit(layout: Layout) -> list[str]:
    """Return the groups whose memory is short."""
    return [memory.group for memory in all_memory(layout) if not memory.fits]


def needs_offload(layout: Layout) -> bool:
    """Return whether the actor and the engines on its GPUs are offloaded in turn (cluster.offload)."""
    if layout.hardware.is_cpu:
        return False
    groups = layout.config.groups()
    memories = [pool_memory(layout, group, pool) for group, pool in groups.items()]
    return _needs_offload(layout, memories, layout.may_share)


def with_micro_batch(layout: Layout) -> Config:
    """Return the configuration with ``actor.max_tokens_per_micro_batch`` decided, where it is null.

    A GPU that has room for it gets twice the usual: of a small model's layers the host's work is then as much as
    before for twice the tokens, and weights are gathered half as often. Nothing is offloaded for that.
    """
    config = layout.config
    if config.actor.max_tokens_per_micro_batch is not None or layout.hardware.is_cpu:
        return config
    larger = config.with_settings({"actor.max_tokens_per_micro_batch": 2 * MICRO_BATCH_TOKENS})
    then = replace(layout, config=larger)
    memory = memory_of(then, "actor")
    fits = memory.margin >= ROOM * memory.available and not groups_that_do_not_fit(then)
    return larger if fits and needs_offload(then) == needs_offload(layout) else config


def _needs_offload(layout: Layout, groups: list[GroupMemory], shared: Shared) -> bool:
    config = layout.config
    engines = [group.group for group in groups if {"actor", group.group} in shared]
    if not engines or config.actor.lora.quantize is not None:
        return False
    if config.cluster.offload != "auto":
        return bool(config.cluster.offload)
    members = [group for group in groups if group.group in ("actor", *engines)]
    return any(not replace(g, available=_available_bytes(layout, g, groups, shared, False)).fits for g in members)


def _available_bytes(
    layout: Layout, group: GroupMemory, groups: list[GroupMemory], shared: Shared, offload: bool
) -> float:
    """Return what a GPU has for a group besides those that share it (``colocate_with``)."""
    others = [other for other in groups if {group.group, other.group} in shared]
    away = {other.group for other in others if offload and "actor" in (group.group, other.group)}
    return layout.hardware.memory - sum(
        _bytes_when_offloaded(other) if other.group in away else other.total for other in others
    )


def _with_weight_sync(layout: Layout, actor: GroupMemory, groups: list[GroupMemory]) -> GroupMemory:
    """Return the memory of an offloaded actor, whose worst moment may be when the engines' weights are there too."""
    rollout = next(group for group in groups if group.group == "rollout")
    names = ("weights", "optimizer state", "context, collectives")
    moment = {name: actor.items[name] for name in names if name in actor.items}
    moment["weights being sent"] = count_sent_bytes(layout)
    moment["engine's weights"] = sum(rollout.items.get(name, 0.0) for name in ("weights", "weights being received"))
    if sum(moment.values()) <= actor.total:
        return actor
    return replace(actor, items=moment, notes=(*actor.notes, "most is needed when weights go to the engines"))


def _bytes_when_offloaded(memory: GroupMemory) -> float:
    """Return what a group that does not work keeps: its process on the GPU, and captured graphs."""
    names = ("context, CUDA graphs", "context, collectives", "collectives", "process")
    return sum(memory.items.get(name, 0.0) for name in names)
