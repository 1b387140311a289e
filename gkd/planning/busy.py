"""What the workers of each group were busy for in a step of a run, by its timeline.json: their own times, no waits.

The file is written by gkd/observability/timeline.py: lanes ``GROUP RANK``, ``driver`` with the stages of every step,
and ``validation``. Times in it are in microseconds.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from gkd.config.base import SCORERS
from gkd.errors import ConfigError

WORK = {"actor": ("update", "log-probabilities"), "rollout": ("sample",), **dict.fromkeys(SCORERS, ("score",))}
"""What the simulation counts of each group, by the names of its activities; new weights are counted by themselves."""


@dataclass(frozen=True, slots=True)
class _Span:
    lane: str
    name: str
    start: float
    end: float
    step: int

    @property
    def group(self) -> str:
        return self.lane.rpartition(" ")[0]


def busy_seconds(path: Path, hosts: Mapping[str, str]) -> dict[str, float]:
    """Return the seconds that a group's workers were busy in a step, on average: the median of steps.

    ``hosts`` maps groups to the one whose devices they compute on. While several groups on the same devices are busy,
    each is taken to have so many times less of them, as the simulation has it. Steps with a validation beside them do
    not count, nor does the first one, which warms up. Empty where the run has no timeline, or no such step in it.
    """
    lanes, spans = _read(path / "timeline.json")
    starts: dict[int, float] = {}
    for span in spans:
        if span.lane == "driver":
            starts[span.step] = min(span.start, starts.get(span.step, span.start))
    validations = [(span.start, span.end) for span in spans if span.lane == "validation"]
    steps = [
        (start, end)
        for (step, start), (following, end) in pairwise(sorted(starts.items()))
        if following == step + 1 and not any(a < end and b > start for a, b in validations)
    ]
    steps = steps[1:] or steps
    if not steps:
        return {}
    work = [span for span in spans if span.name in WORK.get(span.group, ())]
    so_far = _own_times(work, {bound for step in steps for bound in step}, hosts)
    n_workers = Counter(lane.rpartition(" ")[0] for lane in lanes)
    return {
        group: median(so_far[end][group] - so_far[start][group] for start, end in steps) / n_workers[group]
        for group in WORK
        if n_workers[group]
    }


def _own_times(
    spans: Iterable[_Span], bounds: Iterable[float], hosts: Mapping[str, str]
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
                worked[name] += n * (time - at) / load[hosts.get(name, name)] / 1e6
        at = time
        busy[group] += change
        if not group:
            found[time] = defaultdict(float, worked)
    return found


def _read(path: Path) -> tuple[list[str], list[_Span]]:
    """Return all lanes and busy spans of the file; none where there is no file."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        lanes = {event["pid"]: str(event["args"]["name"]) for event in events if event["ph"] == "M"}
        spans = [
            _Span(lanes[e["pid"]], str(e["name"]), float(e["ts"]), float(e["ts"] + e["dur"]), int(e["args"]["step"]))
            for e in events
            if e["ph"] == "X" and e["cat"] == "busy"
        ]
        return list(lanes.values()), spans
    except FileNotFoundError:
        return [], []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--from {path.parent}: timeline.json cannot be read: {error}") from None
