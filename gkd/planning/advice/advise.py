"""What to change when a group does not fit: the smallest sets of changes that do, by level; and the check before a run.

Changes are tried, not guessed (:mod:`gkd.planning.advice.changes`). Those of level 1 train the same, slower. Level 2
takes more GPUs. Level 3 takes memory elsewhere or shortens texts. Level 4 trains less of the model. The estimate is
good to some per cent, so a run that misses by less than :data:`TOLERANCE` is warned and starts.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gkd.config import Config, Engine, load
from gkd.config.device import GB
from gkd.errors import ConfigError
from gkd.planning.advice.changes import LEVEL_NAMES, Change, Value, changes_for, memory_with, overrides, with_gpus
from gkd.planning.layout import Layout, Models, cpu_hardware, gpu_hardware, has_room, without_colocation
from gkd.planning.memory.colocation import (
    all_memory,
    groups_that_do_not_fit,
    memory_of,
    needs_offload,
    with_micro_batch,
)
from gkd.planning.memory.pools import GroupMemory, cache_gb_of, slots_of
from gkd.planning.simulation.stages import estimate_step_s, stages_of

log = logging.getLogger("gkd")
TOLERANCE = 0.1  # of what is available
MOST_CHANGES = 4
CACHE = (".gpu_memory_utilization", ".kv_cache_gb")  # whose larger or smaller values may be what helps
# Their smallest pieces, and several ranks, also cost something: sums of gradients in pieces, NCCL's buffers.
NOT_FREE = ("actor.loss_chunk", "actor.max_tokens_per_micro_batch", "trainer.n_gpus_per_node", "trainer.nnodes")
NOT_AHEAD: Mapping[str, Any] = {"schedule.max_staleness": 0, "schedule.in_flight": False}
SHARES = (0.6, 0.5, 0.4, 0.3)  # of the gpu_memory_utilization of engines on the same GPUs


@dataclass(frozen=True, slots=True)
class Advice:
    """Holds changes after which ``group`` fits.

    ``saves`` bytes of a GPU, on a CPU of the machine's memory; ``host``: bytes it takes of the host's memory for that;
    ``slower``: the step's time against now.
    """

    group: str
    level: int
    settings: Mapping[str, Value]
    saves: float
    margin: float
    slower: float
    host: float = 0.0

    def overrides(self) -> str:
        """Return the changes as overrides to paste."""
        return overrides(self.settings)

    def line(self, is_cpu: bool) -> str:
        """Return the changes and what they cost, in words; ``is_cpu``: where all groups share a machine's memory."""
        host = f", with {self.host / GB:.1f} GB of the host's memory" if self.host and not is_cpu else ""
        scope = "of the machine's memory" if is_cpu else "a GPU"
        saved = f"saves {self.saves / GB:.1f} GB {scope}{host}"
        return f"{self.overrides()} ({saved}; a step takes {self.slower:.2f} of the time)"


def advise(layout: Layout, group: str) -> Iterator[Advice]:
    """Yield, for each level that can make ``group`` fit, its cheapest changes; none when none can, or none need to.

    Each is worked out when it is wanted. Other groups need not fit for it, and may need the same GPUs: see
    :func:`advise_all`.
    """
    if not memory_of(layout, group).fits:
        trials = _Trials(layout, group, {})
        yield from (cheapest for level in LEVEL_NAMES if (cheapest := _find_cheapest(trials, level)) is not None)


def advise_all(layout: Layout, by_group: Mapping[str, Sequence[Advice]] | None = None) -> str | None:
    """Return overrides after which every group fits, of low levels rather; None: all fit already, or there are none.

    ``by_group``: :func:`advise` for each group, where that is known.
    """
    groups = groups_that_do_not_fit(layout)
    if by_group is None:
        by_group = {group: list(advise(layout, group)) for group in groups}
    alone = [] if layout.hardware.is_cpu else groups  # on a CPU what one group leaves is any other's
    if any(not by_group[group] and not _fits_alone(layout, group) for group in alone if group != "reference"):
        return None  # (a reference may come to be needed no more)
    advice_of = {(group, ""): list(by_group[group]) for group in groups}
    # The first in order may take GPUs that the next needs; the mildest changes of one may not be enough for another.
    for begin, pick, order in itertools.product(_list_smaller_shares(layout), (0, -1), (groups, groups[::-1])):
        settings = dict(begin)
        changed = replace(layout, config=layout.config.with_settings(settings))
        for i, group in enumerate([*order, *order]):  # again, for what another's changes took from it or left it
            if group not in groups_that_do_not_fit(changed):
                continue
            if (key := (group, overrides(settings))) not in advice_of:
                advice_of[key] = list(advise(changed, group))
            if advice_of[key]:
                settings |= advice_of[key][pick].settings
                changed = replace(layout, config=layout.config.with_settings(settings))
            elif i >= len(order):
                break
        if settings and not groups_that_do_not_fit(changed):
            return overrides(settings)
    return None


def _list_smaller_shares(layout: Layout) -> list[dict[str, Value]]:
    """Return no changes, and where engines on one GPU are to have more than it has, the largest shares that fit."""
    pairs, short = layout.may_share, groups_that_do_not_fit(layout)
    engines = {
        section: pool.gpu_memory_utilization
        for section, pool in layout.config.pools()
        if isinstance(pool, Engine) and any(section in pair for pair in pairs)
    }
    if len(engines) > 1 and not layout.hardware.is_cpu and not engines.keys().isdisjoint(short):
        for part in SHARES:
            smaller: dict[str, Value] = {
                f"{name}.gpu_memory_utilization": round(share * part, 3) for name, share in engines.items()
            }
            still = groups_that_do_not_fit(replace(layout, config=layout.config.with_settings(smaller)))
            if engines.keys().isdisjoint(still):
                return [{}, smaller]
    return [{}]


def advise_by_memory(layout: Layout, sizes_gb: Sequence[float]) -> list[tuple[float, Advice | None, bool]]:
    """Return, for GPUs of each size, the actor's cheapest advice, and whether it fits as it is."""
    rows = []
    for size in sizes_gb:
        other = replace(layout, hardware=replace(layout.hardware, memory=size * GB))
        other = replace(other, config=with_micro_batch(other))
        rows.append((size, next(advise(other, "actor"), None), memory_of(other, "actor").fits))
    return rows


def explain_shortage(layout: Layout, group: str) -> str:
    """Return one line: what does not fit, and the mildest changes."""
    memory = memory_of(layout, group)
    advice = next(advise(layout, group), None)
    fits = advice.overrides() if advice else advise_all(layout)
    needs = _describe_shortage(memory, layout.hardware.is_cpu)
    return f"{needs}; {f'this fits: {fits}' if fits else explain_no_advice(layout, memory)}"


def _describe_shortage(memory: GroupMemory, is_cpu: bool) -> str:
    if memory.shortage:
        return f"{memory.group}: {memory.shortage}"
    if is_cpu:
        left = f"the other groups leave {max(0.0, memory.available) / GB:.1f} of this machine's memory"
        return f"{memory.group} needs {memory.total / GB:.1f} GB and {left}"
    return f"{memory.group} needs {memory.total / GB:.1f} GB of each GPU and has {max(0.0, memory.available) / GB:.1f}"


def explain_no_advice(layout: Layout, memory: GroupMemory) -> str:
    """Return what would help a group that does not fit, and for which there is no advice."""
    if layout.hardware.is_cpu:
        return "no change of its own settings makes it fit: smaller models, or more memory, would"
    if layout.nodes is not None and next(advise(replace(layout, nodes=None), memory.group), None):
        return "no change of settings makes it fit on the nodes there are: more would"
    if _fits_alone(layout, memory.group):
        return "no change of its own settings makes it fit: smaller groups on its GPUs, or GPUs of its own, would"
    return "no change of settings makes it fit: a smaller model or a larger GPU would"


def _fits_alone(layout: Layout, group: str) -> bool:
    """Return whether a group fits on GPUs of its own, as it is or after changes."""
    alone = without_colocation(replace(layout, nodes=None))
    return memory_of(alone, group).fits or next(advise(alone, group), None) is not None


@dataclass(frozen=True, slots=True)
class _Trials:
    """Holds the memory of ``group`` after changes, each worked out once."""

    layout: Layout
    group: str
    memories: dict[frozenset[tuple[str, Value]], GroupMemory]

    def memory_with(self, settings: Mapping[str, Value]) -> GroupMemory:
        key = frozenset(settings.items())
        if key not in self.memories:
            self.memories[key] = memory_with(self.layout, self.group, settings)
        return self.memories[key]

    def can_fit(self, changes: Sequence[Change]) -> bool:
        """Return whether the strongest changes make it fit, with or without those that also cost something."""
        caches = {change.setting: change.values for change in changes if change.setting.endswith(CACHE)}
        strongest = {change.setting: change.values[-1] for change in changes if change.setting not in caches}
        costly = [name for name in strongest if name in NOT_FREE]
        for n in range(len(costly) + 1):
            for left_out in itertools.combinations(costly, n):
                settings = {name: value for name, value in strongest.items() if name not in left_out}
                tried = [settings, *(settings | {name: v} for name, values in caches.items() for v in values)]
                if any(self.memory_with(values).fits for values in tried):
                    return True
        return False

    def is_minimal(self, settings: Mapping[str, Value]) -> bool:
        """Return whether it fits after the changes, and after no fewer of them."""
        each_left_out = ({name: settings[name] for name in settings if name != left_out} for left_out in settings)
        return self.memory_with(settings).fits and not any(self.memory_with(fewer).fits for fewer in each_left_out)


def _find_cheapest(trials: _Trials, level: int) -> Advice | None:
    """Return, of the smallest sets of changes that fit and use this level, the one with the shortest step."""
    layout, group = trials.layout, trials.group
    changes = [change for change in changes_for(layout, group) if change.level <= level]
    if not trials.can_fit(changes):
        return None
    bytes_now, seconds_now = _bytes_to_save(layout, memory_of(layout, group)), _step_seconds(layout)
    for n in range(1, MOST_CHANGES + 1):
        fitting: list[tuple[Advice, Config]] = []
        for settings in filter(trials.is_minimal, _sets_of_changes(trials, changes, n, level)):
            memory, whole = trials.memory_with(settings), with_gpus(layout, settings)
            config = layout.config.with_settings(whole)
            slower = _step_seconds(replace(layout, config=config)) / seconds_now
            saves = bytes_now - _bytes_to_save(layout, memory)
            fitting.append((Advice(group, level, whole, saves, memory.margin, slower, memory.host), config))
        for advice, config in sorted(fitting, key=lambda one: (round(one[0].slower, 2), one[0].saves)):
            if _is_possible(layout, config):  # which takes longest
                return advice
    return None


def _is_possible(layout: Layout, config: Config) -> bool:
    """Return whether a configuration composes and, where the nodes are known, its groups have room on them."""
    try:
        load(config.model_dump())
    except ConfigError:
        return False
    return layout.nodes is None or has_room(config, layout.nodes)


def _bytes_to_save(layout: Layout, memory: GroupMemory) -> float:
    """Return the bytes of a GPU that all but the cache take, which has what there is; of a CPU, those it lacks."""
    if layout.hardware.is_cpu:
        return -memory.margin  # of all groups together
    return memory.total - memory.items.get("key-value cache", 0.0)


def _sets_of_changes(trials: _Trials, changes: Sequence[Change], n: int, level: int) -> Iterator[dict[str, Value]]:
    """Yield every choice of ``n`` changes of different settings, one of ``level`` at least, each with every value.

    Those are left out that do not fit with their strongest values.
    """
    for subset in itertools.combinations(changes, n):
        if not any(change.level == level for change in subset) or len({change.setting for change in subset}) < n:
            continue
        if trials.can_fit(subset):
            for values in itertools.product(*(change.values for change in subset)):
                yield {change.setting: value for change, value in zip(subset, values, strict=True)}


def _step_seconds(layout: Layout) -> float:
    return estimate_step_s(stages_of(layout), layout.hosts)


def require_memory(
    config: Config, models: Models, gpu_bytes_by_group: Mapping[str, float] | None, gpus_of_nodes: Sequence[int] = ()
) -> None:
    """Raise ConfigError, in one line with advice, unless every group fits on its GPUs.

    ``gpu_bytes_by_group``: memory of the smallest GPU of each group, as CUDA reports it; groups left out are not
    checked. None: all groups compute on this machine's CPU and share its memory. ``gpus_of_nodes``: how many GPUs every
    node has, beyond which no advice goes; empty where that is not known. Does nothing where ``plan.check`` is false,
    and only warns where something is assumed of a model.
    """
    if not config.plan.check:
        return
    override = "plan.check=false starts it all the same"
    for name, layout in _layouts(config, models, gpu_bytes_by_group, gpus_of_nodes).items():
        # On a CPU no group fits when one does not; the largest is the one to change.
        for memory in sorted(all_memory(layout), key=lambda memory: -memory.total):
            if name not in (None, memory.group) or memory.fits:
                continue
            explanation = explain_shortage(layout, memory.group)
            is_certain = not models.assumption
            if is_certain and (memory.shortage or memory.margin < -TOLERANCE * memory.available):
                raise ConfigError(f"{explanation}; {override}")
            log.warning(explanation if is_certain else f"{explanation}; that is by an estimate: {models.assumption}")
            return


def requires_offload(config: Config, models: Models, gpu_bytes_by_group: Mapping[str, float] | None) -> bool:
    """Return whether actor and engines on its GPUs are offloaded in turn; arguments of :func:`require_memory`."""
    return any(needs_offload(layout) for layout in _layouts(config, models, gpu_bytes_by_group).values())


def settings_with_offload(config: Config, offload: bool) -> dict[str, Any]:
    """Return cluster.offload as it was decided, and the settings of the schedule that go with it.

    What is offloaded while engines sample cannot learn meanwhile: where memory decided so nothing is sampled ahead.
    """
    return {"cluster.offload": offload, **(NOT_AHEAD if offload and config.cluster.offload == "auto" else {})}


def plan_sizes(config: Config, models: Models, gpu_bytes_by_group: Mapping[str, float] | None) -> dict[str, Any]:
    """Return settings of sampling engines and of the actor that are planned where they are null; arguments of
    :func:`require_memory`.
    """
    layouts, rollout = _layouts(config, models, gpu_bytes_by_group), config.rollout
    layout, actors = (layouts.get(group, layouts.get(None)) for group in ("rollout", "actor"))
    actor = (config if actors is None else with_micro_batch(actors)).actor
    return {
        "rollout.max_num_seqs": rollout.slots if layout is None else slots_of(layout, "rollout", rollout),
        "rollout.kv_cache_gb": rollout.kv_cache_gb if layout is None else cache_gb_of(layout, "rollout", rollout),
        "actor.max_tokens_per_micro_batch": actor.micro_batch_tokens,
    }


def with_cache_size(layout: Layout) -> Layout:
    """Return the layout with the cache of sampling engines that a run would give them."""
    size = {"rollout.kv_cache_gb": cache_gb_of(layout, "rollout", layout.config.rollout)}
    return replace(layout, config=layout.config.with_settings(size))


def _layouts(
    config: Config, models: Models, gpu_bytes_by_group: Mapping[str, float] | None, gpus_of_nodes: Sequence[int] = ()
) -> dict[str | None, Layout]:
    """Return what to plan, by the group whose GPU it is on; None: all on a CPU."""
    if gpu_bytes_by_group is None:
        return {None: Layout(config, models, cpu_hardware(config.plan))}
    gpu = gpu_hardware(config.plan)  # its speed only orders the advice
    nodes = tuple(gpus_of_nodes) or None
    return {
        group: Layout(config, models, replace(gpu, memory=size), nodes) for group, size in gpu_bytes_by_group.items()
    }
