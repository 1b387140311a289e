"""What the workers of each group were busy for in a step of a run, by its timeline.json: their own times, no waits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    n_workers = Counter(lane.rpartition(" ")[0] for lane in timeline.lanes)
    devices = _SharedDevices(hosts, at_once, shares or {}, n_workers)
    so_far = _own_times(work, {bound for step in steps for bound in step}, devices)
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


@dataclass(frozen=True, slots=True)
class _SharedDevices:
    """Devices that groups work on, as :func:`busy_by_step` is given them, and how many workers each group has."""

    hosts: Mapping[str, str]
    at_once: int
    shares: Mapping[str, float]
    n_workers: Mapping[str, int]

    def slow_down(self, busy: Mapping[str, int]) -> dict[str, float]:
        """Return how many times as long each group takes while so many of its workers are busy, beside the others."""
        load = defaultdict[str, float](float)
        for name, n in busy.items():
            part = min(1.0, n / self.n_workers[name])
            load[self.hosts.get(name, name)] += self.shares.get(name, 1.0) * part / self.at_once
        return {name: slowness(self.shares.get(name, 1.0), load[self.hosts.get(name, name)]) for name in busy}


def _own_times(
    spans: Iterable[TimelineSpan], bounds: Iterable[float], devices: _SharedDevices
) -> dict[float, dict[str, float]]:
    """Return, for each of ``bounds``, the seconds that all workers of each group together have worked until then."""
    changes = [(bound, "", 0) for bound in bounds]
    for span in spans:
        changes += [(span.start, span.group, 1), (span.end, span.group, -1)]
    busy, worked, at = Counter[str](), defaultdict[str, float](float), 0.0
    times: dict[float, dict[str, float]] = {}
    for time, group, change in sorted(changes):
        working = {name: n for name, n in busy.items() if n}
        for name, times_as_long in devices.slow_down(working).items():
            worked[name] += working[name] * (time - at) / times_as_long
        at = time
        busy[group] += change
        if not group:
            times[time] = defaultdict(float, worked)
    return times
