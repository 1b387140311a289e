"""What the workers of each group were busy for in a step of a run, by its timeline.json: their own times, no waits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from statistics import median

from gkd.config.base import SCORERS
from gkd.planning.run_timeline import RunTimeline, TimelineSpan

WORK = {"actor": ("update", "log-probabilities"), "rollout": ("sample",), **dict.fromkeys(SCORERS, ("score",))}
"""What the simulation counts of each group, by the names of its activities; new weights are counted by themselves."""


def busy_seconds(timeline: RunTimeline, hosts: Mapping[str, str], at_once: int = 1) -> dict[str, float]:
    """Return the seconds that a group's workers were busy in a step, on average: the median of steps.

    ``hosts`` maps groups to the one whose devices they compute on. While more than ``at_once`` groups on the same
    devices are busy, each is taken to have so many times less of them, as the simulation has it. Empty without any
    step in the timeline.
    """
    steps = timeline.steps()
    if not steps:
        return {}
    work = [span for span in timeline.spans if span.name in WORK.get(span.group, ())]
    so_far = _own_times(work, {bound for step in steps for bound in step}, hosts, at_once)
    n_workers = Counter(lane.rpartition(" ")[0] for lane in timeline.lanes)
    return {
        group: median(so_far[end][group] - so_far[start][group] for start, end in steps) / n_workers[group]
        for group in WORK
        if n_workers[group]
    }


def _own_times(
    spans: Iterable[TimelineSpan], bounds: Iterable[float], hosts: Mapping[str, str], at_once: int
) -> dict[float, dict[str, float]]:
    """Return, for each of ``bounds``, the seconds that all workers of each group together have worked until then."""
    changes = [(bound, "", 0) for bound in bounds]
    for span in spans:
        changes += [(span.start, span.group, 1), (span.end, span.group, -1)]
    busy, worked, at = Counter[str](), defaultdict[str, float](float), 0.0
    found: dict[float, dict[str, float]] = {}
    for time, group, change in sorted(changes):
        load = Counter(hosts.get(name, name) for name, n in busy.items() if n)
        for name, n in busy.items():
            if n:
                worked[name] += n * (time - at) / max(1.0, load[hosts.get(name, name)] / at_once)
        at = time
        busy[group] += change
        if not group:
            found[time] = defaultdict(float, worked)
    return found
