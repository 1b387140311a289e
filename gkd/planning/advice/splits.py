"""The best split of N GPUs over the groups: every split that fits is estimated, and the quickest are simulated.

A pool has one of three forms: some GPUs of one node, whole nodes, or as many GPUs on every node. A group's time depends
on its own pool alone, so it is worked out once for each size, and only sums and maxima are taken for each split.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gkd.config import GROUP_OF, Config, Engine, Pool, RewardModel, Scorer
from gkd.errors import ConfigError
from gkd.planning.advice.changes import overrides
from gkd.planning.layout import (
    GPU_SETTINGS,
    Layout,
    gpu_hardware,
    has_room,
    models_of,
    placement_defaults,
    without_colocation,
)
from gkd.planning.measured.factors import factors_of
from gkd.planning.memory.pools import pool_memory
from gkd.planning.simulation.run import Step
from gkd.planning.simulation.stages import (
    Factors,
    Stages,
    generate_s,
    score_one_s,
    score_s,
    stages_of,
    sync_s,
    update_s,
)
from gkd.planning.simulation.steps import simulate_layout, streams

Floats = NDArray[np.float64]
KEPT = 8  # combinations of as many GPUs, the fastest of which could turn out not to be placeable
TRIED = 200  # of the quickest splits by estimate, looked at until enough of them can be placed on nodes
SIMULATED = 16  # of those that can
NOT_HIDDEN = 0.1  # of the shorter side, where actor and engines work at the same time: a first guess
WIDTHS = (1, 2, 4, 8)
WORTH = 0.95  # of the time of a step now, beyond which another split is not worth the words


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Holds a pool that fits, its seconds (of an actor: with the weight sync) and those of its last sample."""

    pool: Pool
    seconds: float
    tail: float = 0.0


@dataclass(frozen=True, slots=True)
class Split:
    """Holds a layout, as settings, with its stages and its step at a staleness."""

    settings: dict[str, Any]
    gpus: dict[str, int]
    stages: Stages
    step: Step

    def overrides(self) -> str:
        """Return the settings as overrides to paste."""
        return overrides(self.settings)


def best_splits(
    layout: Layout, n_gpus: int, count: int = 3, staleness: int = 0, factors: Factors | None = None
) -> list[Split]:
    """Return the ``count`` fastest layouts of at most ``n_gpus`` GPUs, with times scaled by ``factors``.

    One with more GPUs than another that is as fast is left out, as long as there are others.
    Raises ConfigError where no layout fits, naming the group that does not, or where there are fewer GPUs than groups.
    """
    sections = [section for section, _ in layout.config.pools()]
    if n_gpus < len(sections):
        raise ConfigError(
            f"--best {n_gpus}: {len(sections)} groups need a GPU each ({', '.join(sections)}); on fewer, plan "
            "placement=single_gpu or placement=2gpu"
        )
    base, scale = without_colocation(layout), factors or Factors()
    sizes = {section: _list_sizes(base, section, n_gpus - len(sections) + 1, n_gpus, scale) for section in sections}
    a_node = layout.config.plan.gpus_per_node
    nodes = [min(a_node, n_gpus - first) for first in range(0, n_gpus, a_node)]
    ahead = staleness > 0 or streams(base)
    placeable = (mix for mix in _order_mixes(sizes, n_gpus, ahead) if has_room(_with_pools(base.config, mix), nodes))
    splits = [_split(layout, base, mix, staleness, scale) for mix in itertools.islice(placeable, SIMULATED)]
    if not splits:
        raise ConfigError(f"--best {n_gpus}: no split of so many GPUs both fits in memory and on nodes")
    splits.sort(key=lambda split: (split.step.seconds, sum(split.gpus.values())))
    best: list[Split] = []
    wasteful: list[Split] = []  # no faster than one of the best, with more GPUs
    for split in splits:
        more = any(all(better.gpus[group] <= n for group, n in split.gpus.items()) for better in best)
        (wasteful if more else best).append(split)
    selection = best[:count] + wasteful[: max(0, count - len(best))]
    return sorted(selection, key=lambda split: split.step.seconds)


def _with_pools(config: Config, mix: dict[str, PoolSize]) -> Config:
    return config.with_settings({section: size.pool for section, size in mix.items()})


def _list_shapes(most: int, n_gpus: int, per_node: int, tp: int) -> Iterator[tuple[int, int]]:
    """Yield GPUs a node and nodes: within one node, whole nodes, a slice of every node of a cluster of ``n_gpus``.

    Only those that engines of ``tp`` GPUs fill, each within a node or on whole ones.
    """
    sizes: set[int] = set()
    within = [(n, 1) for n in range(1, per_node + 1)]
    whole = [(per_node, nnodes) for nnodes in range(2, most // per_node + 1)]
    slices = [(n, n_gpus // per_node) for n in range(1, per_node)]
    for n, nnodes in [*within, *whole, *slices]:
        filled = n % tp == 0 or (n == per_node < tp and n * nnodes % tp == 0)
        if filled and 0 < n * nnodes <= most and n * nnodes not in sizes:
            sizes.add(n * nnodes)
            yield n, nnodes


def _list_sizes(layout: Layout, section: str, most: int, n_gpus: int, factors: Factors) -> list[PoolSize]:
    """List every pool of ``section`` that fits in memory, with engines as wide as set, or as they have to be."""
    pool: Pool = getattr(layout.config, section)
    group = GROUP_OF[section]
    a_node, tp = layout.config.plan.gpus_per_node, 1
    if isinstance(pool, Engine):
        wider = [a_node * k for k in (2, 4)] if pool.across_nodes else []
        widths = (pool.tensor_parallel_size, *WIDTHS, *wider)
        tp = next((width for width in widths if _engine_fits(layout, section, pool, width)), 0)
    sizes = []
    for n, nnodes in _list_shapes(most, n_gpus, a_node, tp) if tp else ():
        width = {"tensor_parallel_size": tp} if isinstance(pool, Engine) else {}
        tried = pool.model_copy(update={"n_gpus_per_node": n, "nnodes": nnodes, **width})
        if section == "teacher" and n * nnodes // tp < len(layout.config.teacher.models):
            continue
        if isinstance(tried, Engine) or pool_memory(layout, group, tried).fits:
            sizes.append(_measure(layout, group, tried, factors))
    if not sizes:
        raise ConfigError(
            f"--best: {group} fits on none of these GPUs, however many of {most}; see the plan without --best"
        )
    return sizes


def _engine_fits(layout: Layout, section: str, pool: Engine, tp: int) -> bool:
    a_node = layout.config.plan.gpus_per_node
    if tp > a_node and not (pool.across_nodes and tp % a_node == 0):
        return False
    tried = pool.model_copy(update={"tensor_parallel_size": tp, "n_gpus_per_node": min(tp, a_node)})
    return pool_memory(layout, section, tried).fits


def _measure(layout: Layout, group: str, pool: Pool, factors: Factors) -> PoolSize:
    if isinstance(pool, Scorer | RewardModel):
        tail = score_one_s(layout, group, pool) * factors.score
        return PoolSize(pool, score_s(layout, group, pool) * factors.score, tail)
    if isinstance(pool, Engine):
        return PoolSize(pool, generate_s(layout, pool) * factors.generate)
    world, nnodes = pool.n_workers, pool.nnodes
    update, sync = update_s(layout, world, nnodes), sync_s(layout, world, nnodes)
    return PoolSize(pool, update * factors.update + sync * factors.sync)


def _order_mixes(sizes: dict[str, list[PoolSize]], n_gpus: int, ahead: bool) -> Iterator[dict[str, PoolSize]]:
    """Yield splits, quickest first by estimate; among equals those of fewer GPUs.

    ``ahead``: actor and engines work at the same time, else one after the other.
    """
    scoring = _Mixes(np.zeros(1), np.zeros(1), np.zeros(1, np.int64), np.zeros((1, 0), np.int64))  # of no group
    for section, of in sizes.items():
        if section not in ("trainer", "rollout"):
            scoring = scoring.join_group(of, n_gpus)
    sampling = scoring.join_group(sizes["rollout"], n_gpus)
    sampled = sampling.seconds + sampling.tails
    candidates: list[tuple[float, int, int, int]] = []
    for a, actor in enumerate(sizes["trainer"]):
        step = sampled + actor.seconds
        if ahead:
            longer = np.maximum(sampled, actor.seconds)
            step = longer + NOT_HIDDEN * (step - longer)
        fitting = np.flatnonzero(sampling.totals + actor.pool.n_workers <= n_gpus)
        quickest = fitting[np.argsort(step[fitting], kind="stable")[:TRIED]]
        candidates += [(float(step[i]), int(sampling.totals[i]) + actor.pool.n_workers, a, int(i)) for i in quickest]
    scorers = [section for section in sizes if section not in ("trainer", "rollout")]
    for _, _, a, i in heapq.nsmallest(TRIED, candidates):
        positions = dict(zip([*scorers, "rollout"], sampling.pool_indices[i], strict=True))
        yield {section: of[a if section == "trainer" else positions[section]] for section, of in sizes.items()}


@dataclass(frozen=True, slots=True)
class _Mixes:
    """Holds combinations of several groups' pools that work side by side: seconds, tails and GPUs of each, and the
    positions ``pool_indices`` of the pools, a column a group.
    """

    seconds: Floats
    tails: Floats
    totals: NDArray[np.int64]
    pool_indices: NDArray[np.int64]

    def join_group(self, sizes: list[PoolSize], most: int) -> _Mixes:
        """Return every combination with one more group; of those with equally many GPUs only the fastest are kept."""
        seconds = np.maximum(self.seconds[:, None], [s.seconds for s in sizes]).ravel()
        tails = np.maximum(self.tails[:, None], [s.tail for s in sizes]).ravel()
        totals = (self.totals[:, None] + np.array([s.pool.n_workers for s in sizes])).ravel()
        order = np.lexsort((seconds + tails, totals))
        starts = np.r_[0, np.flatnonzero(np.diff(totals[order])) + 1]
        place = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
        fastest = order[(place < KEPT) & (totals[order] <= most)]
        old, new = np.divmod(fastest, len(sizes))
        return _Mixes(seconds[fastest], tails[fastest], totals[fastest], np.c_[self.pool_indices[old], new])


def _split(layout: Layout, base: Layout, mix: dict[str, PoolSize], staleness: int, factors: Factors) -> Split:
    settings = placement_defaults(layout.config)
    for section, size in mix.items():
        current, pool = getattr(layout.config, section), size.pool
        settings |= {f"{section}.{name}": None for name in GPU_SETTINGS if getattr(current, name) is not None}
        settings[f"{section}.n_gpus_per_node"] = pool.n_gpus_per_node
        if pool.nnodes != 1 or current.nnodes != 1:
            settings[f"{section}.nnodes"] = pool.nnodes
        if isinstance(pool, Engine) and pool.tensor_parallel_size != current.tensor_parallel_size:
            settings[f"{section}.tensor_parallel_size"] = pool.tensor_parallel_size
    split = replace(base, config=base.config.with_settings(settings))
    step = simulate_layout(split, staleness, factors)
    stages = replace(factors.apply(stages_of(split)), generate=step.generate)
    return Split(settings, {GROUP_OF[section]: size.pool.n_workers for section, size in mix.items()}, stages, step)


def find_faster_split(config: Config, directory: Path, requested: Config) -> str:
    """Return in one line which split of a run's GPUs is faster by simulation, or that none is; or why it is not known.

    Empty where groups share GPUs. ``directory``: what the run wrote, with ``config`` as it ran. ``requested``: the
    configuration as it was requested; what was planned of it is planned anew for another split.
    """
    if config.hosts():
        return ""
    n_gpus, staleness = sum(pool.n_workers for _, pool in config.pools()), config.schedule.max_staleness
    try:
        layout = Layout(config, models_of(config), gpu_hardware(config.plan))
        factors = factors_of(str(directory), layout)
        layout = replace(layout, config=factors.lengths(config))
        step_s = simulate_layout(layout, staleness, factors).seconds
        planned = {f"rollout.{name}": getattr(requested.rollout, name) for name in ("max_num_seqs", "kv_cache_gb")}
        planned["actor.max_tokens_per_micro_batch"] = requested.actor.max_tokens_per_micro_batch
        replanned = replace(layout, config=layout.config.with_settings(planned))
        best = best_splits(replanned, n_gpus, 1, staleness, factors)[0]
    except ConfigError as error:
        return f"whether another split of the GPUs would be faster is not known: {error}"
    measured = f"with what was measured, by gkd plan's simulation ({step_s:.2f} s a step)"
    if best.step.seconds > WORTH * step_s:
        return f"{measured}, no other split of {n_gpus} GPUs is much faster"
    gpus = ", ".join(f"{group} {n}" for group, n in best.gpus.items())
    return f"{measured}, {gpus} would take {best.step.seconds:.2f} s: {best.overrides()}"
