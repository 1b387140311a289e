"""What the driver itself and its messages take of a step, by a run's timeline.json.

Measured is what the simulation lets pass while nobody it waits for works (:class:`DriverTimes`), each by itself. What
is hidden behind other groups' work in one schedule can show in another, but was measured beside that work: of another
schedule than the run's it is an estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from statistics import fmean

from gkd.cluster.workers.activity import find_gaps
from gkd.config.base import SCORERS
from gkd.planning.measured.busy import WORK
from gkd.planning.measured.timeline import STAGES, RunTimeline, TimelineSpan
from gkd.planning.simulation.run import DriverTimes

LOADING = "load weights"
"""What an engine does with a bucket, see :mod:`gkd.rollout.receiving`."""
RECORDING, PREPARING = ("request", "log"), ("prepare",)
"""Activities of the driver between new weights and the next batch, and between that and the actor's update."""


def driver_times(timeline: RunTimeline) -> DriverTimes:
    """Return the means over a run's steps; nothing where its file does not state what the driver did."""
    recording, preparing = timeline.find_spans("driver", RECORDING), timeline.find_spans("driver", PREPARING)
    updates = [span for span in timeline.spans if (span.lane, span.name) == (STAGES, "update")]
    scoring = [(span.start, span.end) for span in timeline.spans if (span.lane, span.name) == (STAGES, "score")]
    working, sampling = timeline.find_spans("actor", WORK["actor"]), timeline.find_spans("rollout", WORK["rollout"])
    loading = timeline.find_spans("rollout", [LOADING])
    pushes = [(span.start, span.end) for span in timeline.spans if (span.lane, span.name) == (STAGES, "sync")]
    scorers = sorted(
        (s for name in SCORERS for s in timeline.find_spans(name, WORK[name])), key=lambda span: span.start
    )
    times = []
    for start, end in timeline.steps():
        prepared, updated = _select_within(preparing, start, end), _select_within(updates, start, end)
        if not prepared or not updated:
            continue
        update, handed_over = updated[-1], prepared[-1].end
        recordings = _select_within(recording, start, end)
        recorded = max((span.end for span in recordings if span.start < handed_over), default=start)
        # With cluster.offload a step is logged before the next one begins and requests its samples.
        before = end - min((span.start for span in recordings if span.start >= handed_over), default=end)
        sampled = any(span.end > start and span.start < end for span in sampling)
        step_times = DriverTimes(
            start_s=before + _seconds_to_begin(sampling, start, end),
            score_s=sum(_sum_idle_seconds(scorers, a, b) for a, b in scoring if start <= (a + b) / 2 < end),
            record_s=before + recorded - start,
            # Answers of the data are the driver's own work; it waits for nobody else then.
            deliver_s=max(0.0, prepared[-1].start - (max(recorded, update.start) if sampled else recorded)),
            prepare_s=handed_over - prepared[-1].start,
            call_s=_sum_idle_seconds(working, handed_over, update.end),
            spared_s=sum(_sum_spared_seconds(loading, a, b) for a, b in pushes if start <= (a + b) / 2 < end),
        )
        times.append(astuple(step_times))
    return DriverTimes(*(fmean(column) for column in zip(*times, strict=True)))


def _select_within(spans: Sequence[TimelineSpan], start: float, end: float) -> list[TimelineSpan]:
    """Return the spans whose middle lies in a step."""
    return [span for span in spans if start <= (span.start + span.end) / 2 < end]


def _seconds_to_begin(sampling: Sequence[TimelineSpan], start: float, end: float) -> float:
    """Return how long after ``start`` the first engine begins; nothing where one is at work already."""
    begun = min((max(start, span.start) for span in sampling if span.end > start and span.start < end), default=start)
    return begun - start


def _sum_idle_seconds(working: Sequence[TimelineSpan], start: float, end: float) -> float:
    """Return the seconds between ``start`` and ``end`` in which none of these workers works."""
    return sum(b - a for a, b in find_gaps(((span.start, span.end) for span in working), start, end))


def _sum_spared_seconds(loading: Sequence[TimelineSpan], start: float, end: float) -> float:
    """Return how long a push takes beside what is between an engine's first bucket and its last, on average."""
    held: dict[str, list[float]] = {}
    for span in _select_within(loading, start, end):
        held.setdefault(span.lane, []).extend((span.start, span.end))
    return end - start - fmean(max(times) - min(times) for times in held.values()) if held else 0.0
