"""Memory of all groups of a layout beside each other: what those on one GPU leave each other, and who is offloaded."""

from __future__ import annotations

from dataclasses import replace

from gkd.config import Engine
from gkd.planning.layout import Layout
from gkd.planning.memory.pools import GroupMemory, pool_memory


def all_memory(layout: Layout, only: str | None = None) -> list[GroupMemory]:
    """Return every group's memory, in the order GPUs are handed out.

    With ``only``, groups that do not bear on that one may be left out. On a CPU each group has what the others leave of
    the machine's memory. On a GPU it has what those on the same GPU leave: all that these take, or, where the actor and
    its engines are offloaded in turn, what they keep while they are.
    """
    pools = layout.config.groups()
    if only is not None and not layout.hardware.is_cpu and not layout.config.hosts():
        pools = {only: pools[only]}
    groups = [pool_memory(layout, group, pool) for group, pool in pools.items()]
    if not layout.hardware.is_cpu:
        offload = _needs_offload(layout, groups)
        if offload and "rollout" in layout.config.groups_on_actor_gpus():
            groups = [_with_weight_sync(group, groups) if group.group == "actor" else group for group in groups]
        return [replace(group, available=_available_bytes(layout, group, groups, offload)) for group in groups]
    widths = [pool.tensor_parallel_size if isinstance(pool, Engine) else 1 for _, pool in layout.config.pools()]
    totals = [group.total * group.n_gpus / tp for group, tp in zip(groups, widths, strict=True)]
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
    return _needs_offload(layout, [pool_memory(layout, group, pool) for group, pool in groups.items()])


def _needs_offload(layout: Layout, groups: list[GroupMemory]) -> bool:
    config = layout.config
    engines = config.groups_on_actor_gpus()
    if not engines or config.actor.lora.quantize is not None:
        return False
    if not config.cluster.offload_is_auto:
        return bool(config.cluster.offload)
    side_by_side = [replace(group, available=_available_bytes(layout, group, groups, False)) for group in groups]
    return any(not memory.fits for memory in side_by_side if memory.group in ("actor", *engines))


def _available_bytes(layout: Layout, group: GroupMemory, groups: list[GroupMemory], offload: bool) -> float:
    """Return what a GPU has for a group besides those that share it (``colocate_with``)."""
    colocated = layout.config.may_share()
    others = [other for other in groups if frozenset((group.group, other.group)) in colocated]
    away = {other.group for other in others if offload and "actor" in (group.group, other.group)}
    return layout.hardware.memory - sum(
        _bytes_when_offloaded(other) if other.group in away else other.total for other in others
    )


def _with_weight_sync(actor: GroupMemory, groups: list[GroupMemory]) -> GroupMemory:
    """Return the memory of an offloaded actor, whose worst moment may be when the engines' weights are there too."""
    rollout = next(group for group in groups if group.group == "rollout")
    kept = ("weights", "optimizer state", "context, collectives")
    moment = {name: actor.items[name] for name in kept if name in actor.items}
    moment["engine's weights"] = sum(rollout.items.get(name, 0.0) for name in ("weights", "weights being received"))
    if sum(moment.values()) <= actor.total:
        return actor
    return replace(actor, items=moment, notes=(*actor.notes, "most is needed when weights go to the engines"))


def _bytes_when_offloaded(memory: GroupMemory) -> float:
    """Return what a group that does not work keeps: its process on the GPU, and captured graphs."""
    return sum(memory.items.get(name, 0.0) for name in ("context, CUDA graphs", "context, collectives", "process"))
