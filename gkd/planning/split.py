"""The best split of N GPUs over the groups: every split that fits is timed.

A pool has one of three forms: some GPUs of one node, whole nodes, or as many GPUs on every node. A group's time depends
on its own pool alone, so it is worked out once for each size, and only sums and maxima are taken for each split.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gkd.cluster.layout import GroupRequest, Node, idle_nodes, solve
from gkd.config import GROUPS, Engine, Pool
from gkd.errors import ConfigError
from gkd.planning.measured import Factors
from gkd.planning.memory import group_memory
from gkd.planning.pipeline import Step, step_of
from gkd.planning.stages import Stages, generate_s, reward_s, score_s, stages_of, sync_s, tail_s, update_s
from gkd.planning.subject import OWN, Subject, apart, changed, no_longer

Floats = NDArray[np.float64]
KEPT = 8  # combinations of as many GPUs, the fastest of which could turn out not to be placeable
TRIED = 200  # of the fastest splits, looked at until enough of them can be placed on nodes
WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Size:
    """A pool that fits: its form, its engines' width, and its seconds (of an actor: with the new weights' way)."""

    n_gpus: int
    nnodes: int
    tensor_parallel: int
    seconds: float
    tail: float = 0.0

    @property
    def total(self) -> int:
        """GPUs."""
        return self.n_gpus * self.nnodes


@dataclass(frozen=True, slots=True)
class Split:
    """A layout, as settings, with its stages and its step at a staleness."""

    settings: dict[str, Any]
    gpus: dict[str, int]
    stages: Stages
    step: Step

    def overrides(self) -> str:
        """To paste behind the command."""
        return " ".join(f"{name}={'null' if value is None else value}" for name, value in self.settings.items())


def best_splits(
    subject: Subject, n_gpus: int, count: int = 3, staleness: int = 0, factors: Factors | None = None
) -> list[Split]:
    """The ``count`` fastest layouts of at most ``n_gpus`` GPUs, in the terms of an earlier run's ``factors``.

    One with more GPUs than another that is as fast is left out, as long as there are others.
    Raises ConfigError where no layout fits, naming the group that does not, or where there are fewer GPUs than groups.
    """
    sections = [section for section, _ in subject.config.pools()]
    if n_gpus < len(sections):
        raise ConfigError(
            f"--best {n_gpus}: {len(sections)} groups need a GPU each ({', '.join(sections)}); on fewer, plan "
            "placement=single_gpu or placement=2gpu"
        )
    base, known = apart(subject), factors or Factors()
    sizes = {section: _sizes(base, section, n_gpus - len(sections) + 1, n_gpus, known) for section in sections}
    nodes = _nodes(n_gpus, subject.config.plan.gpus_per_node)
    found: list[dict[str, Size]] = []
    wasteful: list[dict[str, Size]] = []  # no faster than one of those found, with more GPUs
    for mix in _fastest(sizes, n_gpus, staleness):
        if any(all(size.total <= mix[section].total for section, size in one.items()) for one in found):
            wasteful.append(mix)
        elif _placeable(mix, nodes):
            found.append(mix)
        if len(found) == count:
            break
    found += itertools.islice((mix for mix in wasteful if _placeable(mix, nodes)), count - len(found))
    if not found:
        raise ConfigError(f"--best {n_gpus}: no split of so many GPUs both fits in memory and on nodes")
    splits = [_split(subject, base, mix, staleness, known) for mix in found]
    return sorted(splits, key=lambda split: split.step.seconds)


def _placeable(mix: dict[str, Size], nodes: list[Node]) -> bool:
    requests = [GroupRequest(s, s, size.n_gpus, size.nnodes, None, size.tensor_parallel) for s, size in mix.items()]
    return solve(requests, nodes, 0.0) is not None


def _nodes(n_gpus: int, per_node: int) -> list[Node]:
    whole, rest = divmod(n_gpus, per_node)
    return idle_nodes([per_node] * whole + [rest] * (rest > 0))


def _forms(most: int, n_gpus: int, per_node: int, tp: int) -> Iterator[tuple[int, int]]:
    """GPUs a node and nodes: within one node, whole nodes, a slice of every node of a cluster of ``n_gpus``.

    Those that engines of ``tp`` GPUs fill: each within a node, or on whole ones.
    """
    seen: set[int] = set()
    within = [(n, 1) for n in range(1, per_node + 1)]
    whole = [(per_node, nnodes) for nnodes in range(2, most // per_node + 1)]
    slices = [(n, n_gpus // per_node) for n in range(1, per_node)]
    for n, nnodes in [*within, *whole, *slices]:
        filled = n % tp == 0 or (n == per_node < tp and n * nnodes % tp == 0)
        if filled and 0 < n * nnodes <= most and n * nnodes not in seen:
            seen.add(n * nnodes)
            yield n, nnodes


def _sizes(subject: Subject, section: str, most: int, n_gpus: int, factors: Factors) -> list[Size]:
    """Every pool of ``section`` that fits in memory, with engines as wide as they are set, or as they have to be."""
    pool: Pool = getattr(subject.config, section)
    group = GROUPS.get(section, section)
    a_node, tp = subject.config.plan.gpus_per_node, 1
    if isinstance(pool, Engine):
        wider = [a_node * k for k in (2, 4)] if pool.across_nodes else []
        asked = (pool.tensor_parallel_size, *WIDTHS, *wider)
        tp = next((width for width in asked if _engine_fits(subject, section, pool, width)), 0)
    found = []
    for n, nnodes in _forms(most, n_gpus, a_node, tp) if tp else ():
        width = {"tensor_parallel_size": tp} if isinstance(pool, Engine) else {}
        tried = pool.model_copy(update={"n_gpus_per_node": n, "nnodes": nnodes, **width})
        if section == "teacher" and n * nnodes // tp < len(subject.config.teacher.models):
            continue
        if isinstance(tried, Engine) or group_memory(subject, group, tried).fits:
            found.append(_timed(subject, group, tried, tp, factors))
    if not found:
        raise ConfigError(
            f"--best: {group} fits on none of these GPUs, however many of {most}; see the plan without --best"
        )
    return found


def _engine_fits(subject: Subject, section: str, pool: Engine, tp: int) -> bool:
    a_node = subject.config.plan.gpus_per_node
    if tp > a_node and not (pool.across_nodes and tp % a_node == 0):
        return False
    tried = pool.model_copy(update={"tensor_parallel_size": tp, "n_gpus_per_node": min(tp, a_node)})
    return group_memory(subject, section, tried).fits


def _timed(subject: Subject, group: str, pool: Pool, tp: int, factors: Factors) -> Size:
    n, nnodes, world = pool.n_gpus_per_node, pool.nnodes, pool.n_workers
    if group == "actor":
        seconds = update_s(subject, world, nnodes) * factors.update + sync_s(subject, world) * factors.sync
        return Size(n, nnodes, 1, seconds)
    if not isinstance(pool, Engine):
        seconds, last = reward_s(subject, pool)
        return Size(n, nnodes, tp, seconds * factors.score, last * factors.score)
    if group == "rollout":
        return Size(n, nnodes, tp, generate_s(subject, pool) * factors.generate)
    score, tail = score_s(subject, group, pool), tail_s(subject, group, pool)
    return Size(n, nnodes, tp, score * factors.score, tail * factors.score)


def _fastest(sizes: dict[str, list[Size]], n_gpus: int, staleness: int) -> Iterator[dict[str, Size]]:
    """Splits, fastest first; among equals those of fewer GPUs."""
    beside = _Mix.nothing()
    for section, of in sizes.items():
        if section not in ("trainer", "rollout"):
            beside = beside.joined(of, n_gpus)
    sampling = beside.joined(sizes["rollout"], n_gpus)
    sampled = sampling.seconds + sampling.tails
    found: list[tuple[float, int, int, int]] = []
    for a, actor in enumerate(sizes["trainer"]):
        step = sampled + actor.seconds if staleness == 0 else np.maximum(sampled, actor.seconds)
        fitting = np.flatnonzero(sampling.totals + actor.total <= n_gpus)
        quickest = fitting[np.argsort(step[fitting], kind="stable")[:TRIED]]
        found += [(float(step[i]), int(sampling.totals[i]) + actor.total, a, int(i)) for i in quickest]
    judges = [section for section in sizes if section not in ("trainer", "rollout")]
    for _, _, a, i in heapq.nsmallest(TRIED, found):
        chosen = dict(zip([*judges, "rollout"], sampling.chosen[i], strict=True))
        yield {section: of[a if section == "trainer" else chosen[section]] for section, of in sizes.items()}


@dataclass(frozen=True, slots=True)
class _Mix:
    """Combinations of several groups' pools that work side by side: seconds, tails and GPUs of each, and the
    positions ``chosen`` of the pools, a column a group.
    """

    seconds: Floats
    tails: Floats
    totals: NDArray[np.int64]
    chosen: NDArray[np.int64]

    @staticmethod
    def nothing() -> _Mix:
        """No group yet."""
        return _Mix(np.zeros(1), np.zeros(1), np.zeros(1, np.int64), np.zeros((1, 0), np.int64))

    def joined(self, sizes: list[Size], most: int) -> _Mix:
        """Every combination with one more group; of those with equally many GPUs only the fastest are kept."""
        seconds = np.maximum(self.seconds[:, None], [s.seconds for s in sizes]).ravel()
        tails = np.maximum(self.tails[:, None], [s.tail for s in sizes]).ravel()
        totals = (self.totals[:, None] + np.array([s.total for s in sizes])).ravel()
        order = np.lexsort((seconds + tails, totals))
        starts = np.r_[0, np.flatnonzero(np.diff(totals[order])) + 1]
        place = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
        kept = order[(place < KEPT) & (totals[order] <= most)]
        old, new = np.divmod(kept, len(sizes))
        return _Mix(seconds[kept], tails[kept], totals[kept], np.c_[self.chosen[old], new])


def _split(subject: Subject, base: Subject, mix: dict[str, Size], staleness: int, factors: Factors) -> Split:
    settings = no_longer(subject.config)
    for section, size in mix.items():
        pool = getattr(subject.config, section)
        settings |= {f"{section}.{name}": None for name in OWN if getattr(pool, name) is not None}
        settings[f"{section}.n_gpus_per_node"] = size.n_gpus
        if size.nnodes != 1 or pool.nnodes != 1:
            settings[f"{section}.nnodes"] = size.nnodes
        if isinstance(pool, Engine) and size.tensor_parallel != pool.tensor_parallel_size:
            settings[f"{section}.tensor_parallel_size"] = size.tensor_parallel
    stages = factors.apply(stages_of(replace(base, config=changed(base.config, settings))))
    gpus = {GROUPS.get(section, section): size.total for section, size in mix.items()}
    return Split(settings, gpus, stages, step_of(stages, staleness))
