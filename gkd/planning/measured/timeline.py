"""A run's timeline.json, as far as a plan takes its times from it.

The file is written by gkd/observability/timeline.py: lanes ``GROUP RANK``, of which ``driver 0`` is the driver's
process, ``driver`` with the stages of every step, and ``validation``. Times in it are in microseconds, here in seconds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

from gkd.config.output_files import EVENTS, TIMELINE, parse, read_whole_lines
from gkd.errors import ConfigError

STAGES, VALIDATION = "driver", "validation"
DISTURBANCES = ("death", "restart", "resume")
"""Events whose steps have waits that others do not: for workers that ended and are started anew."""


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """One activity of a worker or of the driver, or a stage of a step."""

    lane: str
    name: str
    start: float
    end: float
    step: int

    @property
    def group(self) -> str:
        """The group of the worker; empty of a stage."""
        return self.lane.rpartition(" ")[0]


@dataclass(frozen=True, slots=True)
class RunTimeline:
    """Holds all lanes of a run and what was done in them, without the waits.

    ``disturbed`` are the steps in which workers ended.
    """

    lanes: tuple[str, ...]
    spans: tuple[TimelineSpan, ...]
    disturbed: frozenset[int] = frozenset()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file of the run in ``path``; empty where there is none. Raises ConfigError for a broken one."""
        try:
            events = parse((path / TIMELINE).read_bytes())["traceEvents"]
            lanes = {event["pid"]: str(event["args"]["name"]) for event in events if event["ph"] == "M"}
            spans = [
                TimelineSpan(
                    lanes[e["pid"]], str(e["name"]), e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, int(e["args"]["step"])
                )
                for e in events
                if e["ph"] == "X" and e["cat"] == "busy"
            ]
            return cls(tuple(lanes.values()), tuple(spans), find_disturbed_steps(path))
        except FileNotFoundError:
            return cls((), ())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: timeline.json cannot be read: {error}") from None

    def steps(self) -> list[tuple[float, float]]:
        """Return start and end of all steps but the first, which warms up, and those with a validation beside
        them or in which workers ended.
        """
        starts: dict[int, float] = {}
        for span in self.spans:
            if span.lane == STAGES:
                starts[span.step] = min(span.start, starts.get(span.step, span.start))
        validations = [(span.start, span.end) for span in self.spans if span.lane == VALIDATION]
        steps = [
            (start, end)
            for (step, start), (following, end) in pairwise(sorted(starts.items()))
            if following == step + 1
            and step not in self.disturbed
            and not any(a < end and b > start for a, b in validations)
        ]
        return steps[1:] or steps

    def find_spans(self, group: str, names: Collection[str]) -> list[TimelineSpan]:
        """Return the spans of these names of a group's workers, in the order in which they began."""
        spans = [span for span in self.spans if span.group == group and span.name in names]
        return sorted(spans, key=lambda span: span.start)


def find_disturbed_steps(path: Path) -> frozenset[int]:
    """Return the steps in which workers ended or began anew, by events.jsonl; none without the file."""
    events = read_whole_lines(path / EVENTS)
    steps = [event.get("step") for event in events if event.get("kind") in DISTURBANCES]
    return frozenset(step for step in steps if isinstance(step, int))
