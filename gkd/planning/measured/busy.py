"""What the workers of each group were busy for in a step of a run, by its timeline.json: their own times, no waits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from gkd.config.base import SCORERS
from gkd.planning.measured.timeline import RunTimeline, TimelineSpan
from gkd.planning.simulation.run import Pace, slowness

WORK = {"actor": ("update", "log-probabilities"), "rollout": ("sample",), **dict.fromkeys(SCORERS, ("score",))}
"""What the simulation counts of each group, by the names of its activities; new weights are counted by themselves."""
MOST_PACES = 32
"""Steps whose paces are simulated, the last ones of a run."""


def busy_by_step(
    timeline: RunTimeline, hosts: Mapping[str, str], at_once: int = 1, shares: Mapping[str, float] | None = None
) -> list[dict[str, float]]:
    """Return the seconds that each group's workers were busy in every step, on average over the workers.

    ``hosts`` maps groups to the one whose devices they compute on, and ``shares`` to the parts of their time in which
    these work. While more than ``at_once`` groups on the same devices are busy, each is taken to have so many times
    less of them, as the simulation has it.
    """
    steps = timeline.steps()
    work = [span for span in timeline.spans if span.name in WORK.get(span.group, ())]
    so_far = _own_times(work, {bound for step in steps for bound in step}, hosts, at_once, shares or {})
    n_workers = Counter(lane.rpartition(" ")[0] for lane in timeline.lanes)
    groups = [group for group in WORK if n_workers[group]]
    return [
        {group: (so_far[end][group] - so_far[start][group]) / n_workers[group] for group in groups}
        for start, end in steps
    ]


def busy_seconds(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over steps of each group's seconds; empty without a step."""
    return {group: fmean(step[group] for step in steps) for group in steps[0]} if steps else {}


def paces_of(steps: Sequence[Mapping[str, float]]) -> tuple[Pace, ...]:
    """Return how much longer than on average each group was busy in each of some steps, one after the other."""
    last = steps[-MOST_PACES:]
    mean = busy_seconds(last)

    def compare(step: Mapping[str, float], *groups: str) -> float:
        usual = sum(mean.get(group, 0.0) for group in groups)
        return sum(step.get(group, 0.0) for group in groups) / usual if usual else 1.0

    return tuple(Pace(compare(step, "rollout"), compare(step, *SCORERS), compare(step, "actor")) for step in last)


def _own_times(
    spans: Iterable[TimelineSpan],
    bounds: Iterable[float],
    hosts: Mapping[str, str],
    at_once: int,
    shares: Mapping[str, float],
) -> dict[float, dict[str, float]]:
    """Return, for each of ``bounds``, the seconds that all workers of each group together have worked until then."""
    changes = [(bound, "", 0) for bound in bounds]
    for span in spans:
        changes += [(span.start, span.group, 1), (span.end, span.group, -1)]
    busy, worked, at = Counter[str](), defaultdict[str, float](float), 0.0
    times: dict[float, dict[str, float]] = {}
    for time, group, change in sorted(changes):
        working, load = [name for name, n in busy.items() if n], defaultdict[str, float](float)
        for name in working:
            load[hosts.get(name, name)] += shares.get(name, 1.0) / at_once
        for name in working:
            worked[name] += busy[name] * (time - at) / slowness(shares.get(name, 1.0), load[hosts.get(name, name)])
        at = time
        busy[group] += change
        if not group:
            times[time] = defaultdict(float, worked)
    return times
