"""timeline.json: what every worker did when, with the cause of each wait, as Chrome trace events (ui.perfetto.dev).

A step has stages, whose bounds the driver measures: ``generate`` until the batch's last sample was finished, ``score``
until it was scored, ``validate`` until a validation beside it was over, ``update`` and ``sync``, and within this last
one ``drain`` whenever engines still sampled what earlier weights were for. A worker that does nothing waits in each of
them for the group that the stage belongs to, see :data:`CAUSES`; while the driver alone does something, as where a
tracker is slow, it waits for the ``driver``.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from gkd.cluster.workers.activity import ActivitySpan, find_gaps
from gkd.config.base import SCORERS
from gkd.durable import reason, replace
from gkd.types import TrainingSample

if TYPE_CHECKING:
    from gkd.cluster.workers.reports import WorkerReport

log = logging.getLogger("gkd")

WRITE_EVERY_S = 30.0
MAX_EVENTS = 300_000
"""Of the file, which is written whole, 150 bytes each. A scorer that waits between samples has thousands in a step."""
DRIVER = "driver 0"
"""The driver's process among the workers', beside the lane ``driver``, which has the stages of the steps."""
DRIVERS_WORK = ("request", "log", "log samples", "prepare")
"""What the driver's process does itself; in a validation it waits for others."""
SHORTEST_S = 1e-4
"""Waits below this are no events of their own."""
STAGES = ("generate", "score", "validate", "update")
CAUSES = {"generate": ("rollout", "batch"), "validate": ("rollout", "validation"), "update": ("actor", "weights"),
          "sync": ("actor", "weights"), "drain": ("rollout", "batch"), "driver": ("driver", "driver")}  # fmt: skip
"""The group that a worker waits for in a stage, and what for. Scores are waited for by the name of whose come last:
``teacher``, ``reference``, ``reward_model`` or ``rewards``."""
ENGINE_CAUSES = {"generate": "tickets", "drain": "weights"}
"""What an engine waits for that is done with its part of a batch: further tickets; weights, which others hold up."""


@dataclass(frozen=True, slots=True)
class StepStages:
    """When the stages of a step ended, seconds since 1970 by the driver's clock."""

    start: float
    generated: float
    scored: float
    updated: float
    end: float
    validated: float = 0.0
    """When the validation of the step before was over, where the optimizer step waited for one."""
    drains: tuple[tuple[float, float], ...] = ()
    """Start and end of each time after the update in which engines still sampled what earlier weights were for."""

    def spans(self) -> list[tuple[str, float, float]]:
        """Return name, start and end of each; one that lay before the step's start, as sampled ahead, is empty."""
        bounds = [self.start]
        for bound in (self.generated, self.scored, self.validated, self.updated):
            bounds.append(min(max(bound, bounds[-1]), self.end))
        spans = list(zip(STAGES, bounds, bounds[1:], strict=False))
        pushes = [("sync", *gap) for gap in find_gaps(self.drains, bounds[-1], self.end)]
        drains = [("drain", start, end) for start, end in self.drains]
        return spans + sorted(pushes + drains, key=lambda span: span[1])

    def step_of(self, span: ActivitySpan, step: int) -> int:
        """Return the step of a span; what was done before ``step``, as in a validation, is of the one before."""
        return step - (span.end < self.start) + (span.start >= self.end)


class Timeline:
    """Collects the steps of a run, and writes the newest ``n_steps`` of them to ``path``.

    Of steps that have more than :data:`MAX_EVENTS` together it has fewer, the newest, which a line states once.
    A run that goes on after ``step`` keeps what the file has of steps up to it. With ``n_steps`` 0 nothing is written.
    ``elsewhere``: who scores where no worker of the run does, such as an external teacher.
    """

    def __init__(self, path: Path, n_steps: int, step: int = 0, elsewhere: str = "rewards") -> None:
        self._path, self._n_steps, self._elsewhere = path, n_steps, elsewhere
        self._steps: deque[list[str]] = deque(maxlen=max(1, n_steps))  # events as JSON, of which there may be a million
        self._lanes: dict[str, int] = {}
        self._idle: dict[str, list[float]] = defaultdict(list)  # seconds of a step, by group
        self._waits: list[dict[str, float]] = []
        self._lengths: list[float] = []  # of steps, seconds
        self._ended = 0.0  # the last step
        self._begun: dict[str, list[ActivitySpan]] = {}  # of workers that were busy with the next step already
        self._clocks: dict[str, tuple[float, float]] = {}
        self._is_full = False  # steps were dropped for the number of their events
        self._written = time.monotonic()
        if n_steps and step:
            self._read(step)

    def add(
        self, step: int, stages: StepStages, reports: Iterable[WorkerReport], driver_spans: Iterable[ActivitySpan] = ()
    ) -> dict[str, float]:
        """Add a step, by what the workers state of themselves after it, and what the driver did by ``driver_spans``.

        Returns perf/busy/GROUP, the share of the step in which the group's workers did something, and
        perf/waits_for/GROUP, the share in which workers (of all groups, on average) did nothing because of the group,
        or of the driver.
        """
        new = {f"{report.worker.group} {report.worker.rank}": self._spans(report) for report in reports}
        lanes = [*new.items(), (DRIVER, list(driver_spans))]
        spans = {lane: [*self._begun.get(lane, ()), *lane_spans] for lane, lane_spans in lanes}
        self._begun = {lane: [span for span in lane_spans if span.end > stages.end] for lane, lane_spans in lanes}
        if abs(stages.start - self._ended) < SHORTEST_S:  # one moment, of which two clocks were read twice
            stages = dataclasses.replace(stages, start=self._ended)
        self._ended, length = stages.end, max(stages.end - stages.start, 1e-9)
        events = [self._event("driver", name, a, b, step) for name, a, b in stages.spans() if b - a > SHORTEST_S]
        events += [self._event(DRIVER, s.name, s.start, s.end, stages.step_of(s, step)) for s in lanes[-1][1]]
        busy: dict[str, list[float]] = defaultdict(list)
        waited: dict[str, float] = defaultdict(float)
        pace = _find_slowest_scorer(spans, stages) or self._elsewhere
        drivers = [span for span in spans.pop(DRIVER) if span.name in DRIVERS_WORK]
        alone = _find_alone(drivers, chain(*spans.values()), stages)
        for lane, lane_spans in spans.items():
            group = lane.rpartition(" ")[0]
            events += [self._event(lane, s.name, s.start, s.end, stages.step_of(s, step), s.version) for s in new[lane]]
            idle = list(_find_idle([*lane_spans, *alone], stages)) + [
                ("driver", span.start, span.end) for span in alone
            ]
            busy[group].append(1.0 - sum(b - a for _, a, b in idle) / length)
            for stage, start, end in idle:
                group_behind, cause = (pace, pace) if stage == "score" else CAUSES[stage]
                waited[group_behind] += (end - start) / length
                if end - start > SHORTEST_S:
                    cause = ENGINE_CAUSES.get(stage, cause) if group == "rollout" else cause
                    events.append(self._event(lane, f"waits-for-{cause}", start, end, step, cause=cause))
        row = {f"perf/busy/{group}": fmean(shares) for group, shares in busy.items()}
        waited = {group: waited[group] / len(spans) for group in sorted(waited)}
        row |= {f"perf/waits_for/{group}": share for group, share in waited.items()}
        for group in busy:
            self._idle[group].append((1.0 - row[f"perf/busy/{group}"]) * length)
        self._waits.append(waited)
        self._lengths.append(length)
        self._steps.append(events)
        self._drop_oldest_steps()
        if time.monotonic() - self._written > WRITE_EVERY_S:
            self.write()
        return row

    def add_validation(self, step: int, start: float, end: float) -> None:
        """Add the validation of the weights after ``step``, from its request to its figures, to the newest step."""
        if self._steps:
            self._steps[-1].append(self._event("validation", "validate", start, end, step, version=step))

    def _drop_oldest_steps(self) -> None:
        """Drop steps beyond :data:`MAX_EVENTS`; never the newest."""
        n_events, is_full = sum(map(len, self._steps)), False
        while n_events > MAX_EVENTS and len(self._steps) > 1:
            n_events, is_full = n_events - len(self._steps.popleft()), True
        if is_full and not self._is_full:
            self._is_full = True
            log.info(
                "%s has the newest %s steps, not trainer.n_timeline_steps=%s: it is bounded to %s events",
                self._path.name, f"{len(self._steps):,}", self._n_steps, f"{MAX_EVENTS:,}",
            )  # fmt: skip

    def _spans(self, report: WorkerReport) -> list[ActivitySpan]:
        """Return a worker's spans by the driver's clock.

        The node's clock was read between two readings of the driver's. The closest two since either clock was last set
        show how far it is ahead; one that may be equal is taken to be.
        """
        node, clock = report.worker.node, report.contents["clock"]
        least, most = clock - report.received, clock - report.sent  # that it is ahead; crossed while a clock is set
        ahead, width = self._seconds_ahead(node), most - least
        closer = node not in self._clocks or width < self._clocks[node][0]
        if width >= 0 and (closer or not least <= ahead <= most):
            self._clocks[node] = (width, max(0.0, least) + min(0.0, most))
        ahead = self._seconds_ahead(node)
        spans = (ActivitySpan(*span) for span in report.contents["spans"])
        return [span._replace(start=span.start - ahead, end=span.end - ahead) for span in spans]

    def _seconds_ahead(self, node: str) -> float:
        """Return how far a node's clock is ahead of the driver's, by the steps so far."""
        return self._clocks.get(node, (0.0, 0.0))[1]

    def correct_times(self, samples: list[TrainingSample], nodes: Sequence[str]) -> list[TrainingSample]:
        """Return samples of engines on these ``nodes``, by their numbers, with their times by the driver's clock."""
        ahead = [self._seconds_ahead(node) for node in nodes]
        if not any(ahead):
            return samples
        times = [
            (sample.generated_s - ahead[sample.worker], sample.scored_s - ahead[sample.worker]) for sample in samples
        ]
        return [
            dataclasses.replace(sample, generated_s=generated, scored_s=scored)
            for sample, (generated, scored) in zip(samples, times, strict=True)
        ]

    def summary(self) -> str:
        """Return in one line who set the pace, and how long workers of each group waited in a step.

        Those are means; empty before the first step.
        """
        waits = {
            group: fmean(step.get(group, 0.0) for step in self._waits) for group in dict.fromkeys(chain(*self._waits))
        }
        if not waits:
            return ""
        pace = max(waits, key=lambda group: waits[group])
        pace = "the driver (trackers, on_step, files)" if pace == "driver" else pace
        waited = ", ".join(f"{group} {fmean(idle):.3g} s" for group, idle in self._idle.items())
        return f"the pace is set by {pace}; workers waited in a step of {fmean(self._lengths):.3g} s: {waited}"

    def write(self) -> None:
        """Write the file, whole; where that fails, with a warning, not again."""
        self._written = time.monotonic()
        if self._n_steps:
            names = [
                {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": lane}}
                for lane, pid in self._lanes.items()
            ]
            events = ", ".join(chain(map(json.dumps, names), *self._steps))
            text = f'{{"traceEvents": [{events}], "displayTimeUnit": "ms"}}'
            try:
                replace(self._path, text.encode())
            except OSError as error:
                self._n_steps = 0
                log.warning("the timeline is not written any more: %s", reason(error, self._path))

    def _event(self, lane: str, name: str, start: float, end: float, step: int, version: int | None = None,
               cause: str | None = None) -> str:  # fmt: skip
        """Return an event as JSON."""
        pid = self._lanes.setdefault(lane, len(self._lanes) + 1)
        details = {"step": step, "version": version, "cause": cause}
        about = {key: value for key, value in details.items() if value is not None}
        kind = "busy" if cause is None else "idle"
        ts = round(start * 1e6)
        # By its rounded end: of events that overlap by a microsecond Perfetto leaves one out.
        span = {"ts": ts, "dur": max(0, round(end * 1e6) - ts)}
        return json.dumps({"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": 0, **span, "args": about})

    def _read(self, step: int) -> None:
        """Take over earlier steps from the file, where it can be read."""
        try:
            events = json.loads(self._path.read_text(encoding="utf-8"))["traceEvents"]
            lanes = {e["args"]["name"]: int(e["pid"]) for e in events if e["ph"] == "M"}
            by_step: dict[int, list[str]] = defaultdict(list)
            for event in events:
                if event["ph"] == "X" and event["args"]["step"] <= step:
                    by_step[event["args"]["step"]].append(json.dumps(event))
        except (OSError, ValueError, KeyError, TypeError):
            return
        self._lanes = lanes
        self._steps.extend(by_step[number] for number in sorted(by_step))


def _find_idle(spans: Iterable[ActivitySpan], stages: StepStages) -> Iterable[tuple[str, float, float]]:
    """Yield stage, start and end of every time in which none of ``spans`` was."""
    busy = sorted((span.start, span.end) for span in spans)
    for stage, begin, until in stages.spans():
        for start, end in find_gaps(busy, begin, until):
            yield stage, start, end


def _find_alone(
    drivers: Iterable[ActivitySpan], workers: Iterable[ActivitySpan], stages: StepStages
) -> list[ActivitySpan]:
    """Return the parts of the driver's spans within a step in which no worker did anything."""
    busy = sorted((span.start, span.end) for span in workers)
    return [
        span._replace(start=start, end=end)
        for span in drivers
        for start, end in find_gaps(busy, max(span.start, stages.start), min(span.end, stages.end))
    ]


def _find_slowest_scorer(spans: Mapping[str, Sequence[ActivitySpan]], stages: StepStages) -> str:
    """Return the group whose workers were busy last before the batch was scored; empty without any."""
    last = {
        lane.rpartition(" ")[0]: max((s.end for s in lane_spans if s.start <= stages.scored), default=0.0)
        for lane, lane_spans in spans.items()
        if lane.rpartition(" ")[0] in SCORERS
    }
    return max(last, key=lambda group: last[group], default="")
