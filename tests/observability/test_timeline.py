"""timeline.json, and the shares of a step that it makes of what workers did, by hand-made steps."""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gkd.cluster.workers.activity import Activity, ActivitySpan, record_activity
from gkd.cluster.workers.reports import WorkerReport
from gkd.observability.metrics import stage_metrics
from gkd.observability.page.run import read_spans
from gkd.observability.timeline import StepStages, Timeline
from tests.error_text import contains_in_order
from tests.samples import training_sample
from tests.weights.reports import report

STAGES = StepStages(start=100.0, generated=104.0, scored=105.0, updated=109.0, end=110.0)


Done = tuple[str, float, float]


def reported(group: str, rank: int, *spans: Done, clock: float = 110.5, node: str = "near") -> WorkerReport:
    worker = report(group, rank, "GPU-0", node)
    return WorkerReport(
        worker, 110.0, 111.0, {"memory": {}, "clock": clock, "spans": [ActivitySpan(*span) for span in spans]}
    )


def step_of_four() -> list[WorkerReport]:
    return [
        reported("actor", 0, ("update", 105.0, 109.0), ("pack weights", 109.0, 109.5)),
        reported("rollout", 0, ("validate", 90.0, 95.0), ("sample", 100.0, 104.0), ("load weights", 109.0, 110.0)),
        reported("rollout", 1, ("sample", 100.0, 102.0), ("load weights", 109.0, 110.0)),
        reported("teacher", 0, ("score", 101.0, 103.0), ("score", 103.5, 105.0)),
    ]


def test_shares_of_a_step_add_up(tmp_path: Path) -> None:
    row = Timeline(tmp_path / "timeline.json", 10).add(7, STAGES, step_of_four())
    assert row["perf/busy/actor"] == pytest.approx(0.45)
    assert row["perf/busy/rollout"] == pytest.approx((0.5 + 0.3) / 2)
    assert row["perf/busy/teacher"] == pytest.approx(0.35)
    # Of 40 worker-seconds: 4 + 2 + 1.5 idle while sampling went on, 1 + 1 + 1 for the teacher, 4 + 4 + 4 for the
    # update, 0.5 + 0 + 0 + 1 for the push.
    assert row["perf/waits_for/rollout"] == pytest.approx(7.5 / 40)
    assert row["perf/waits_for/teacher"] == pytest.approx(3 / 40)
    assert row["perf/waits_for/actor"] == pytest.approx(13.5 / 40)
    assert sum(v for k, v in row.items() if "waits_for" in k) == pytest.approx(1 - (4.5 + 5 + 3 + 3.5) / 40)


def test_workers_wait_for_the_driver_while_it_alone_does_something(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    timeline = Timeline(file, 10)
    own = [
        ActivitySpan("request", 99.0, 100.25),  # the quarter second in the step beside two engines that sample
        ActivitySpan("log", 101.5, 103.25),  # beside a sampler all the time
        ActivitySpan("prepare", 104.5, 105.5),  # beside the teacher until 105, where the update begins
        ActivitySpan("validate", 109.5, 109.75),  # beside an engine, and a wait for others anyway
        ActivitySpan("log", 109.75, 110.5),  # half of it within the next step
    ]
    late = [reported("actor", 0, ("update", 105.25, 109.0)), *step_of_four()[1:3]]
    late += [reported("teacher", 0, ("score", 101.0, 103.0), ("score", 103.5, 105.0))]
    row = timeline.add(7, STAGES, late, own)
    assert row["perf/waits_for/driver"] == pytest.approx(0.25 * 4 / 40)  # 105 to 105.25, all four
    assert row["perf/busy/actor"] == pytest.approx(0.375)
    later = StepStages(start=110.0, generated=112.0, scored=112.0, updated=114.0, end=114.0)
    row = timeline.add(8, later, [reported("actor", 0, ("update", 112.0, 114.0))], [])
    assert row["perf/waits_for/driver"] == pytest.approx(0.5 / 4)
    assert row["perf/waits_for/rollout"] == pytest.approx(1.5 / 4)
    timeline.write()
    events = json.loads(file.read_text())["traceEvents"]
    waits = [(e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["name"] == "waits-for-driver"]
    assert waits == [(105.0, 0.25)] * 4 + [(110.0, 0.5)]


def test_a_driver_that_sets_the_pace_is_named(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json", 10)
    own = [ActivitySpan("log", 100.0, 107.0)]  # a slow tracker
    stages = StepStages(start=100.0, generated=108.0, scored=108.0, updated=109.5, end=110.0)
    timeline.add(7, stages, [reported("actor", 0, ("update", 108.0, 109.5)), reported("rollout", 0)], own)
    pace, _ = timeline.summary().split("; ")
    assert contains_in_order(pace, "driver")


def test_what_is_done_for_the_next_step_while_this_one_is_logged_counts_there(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    timeline = Timeline(file, 10)
    timeline.add(7, STAGES, [reported("rollout", 0, ("sample", 100.0, 104.0), ("sample", 110.0, 110.5))])
    stages = StepStages(start=110.0, generated=111.0, scored=111.0, updated=112.0, end=112.0)
    row = timeline.add(8, stages, [reported("rollout", 0, ("sample", 110.5, 111.0))])
    assert row["perf/busy/rollout"] == pytest.approx(0.5)
    timeline.write()
    events = json.loads(file.read_text())["traceEvents"]
    assert [e["args"]["step"] for e in events if e["name"] == "sample"] == [7, 8, 8]


def test_a_step_that_waits_for_the_validation_of_the_one_before_says_so(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    timeline = Timeline(file, 10)
    timeline.add(6, replace(STAGES, start=90.0, end=100.0), [])
    timeline.add_validation(6, 100.0, 107.0)
    row = timeline.add(7, replace(STAGES, validated=107.0), step_of_four())
    assert row["perf/waits_for/rollout"] == pytest.approx((7.5 + 6) / 40)  # three idle workers, while it was waited for
    assert row["perf/waits_for/actor"] == pytest.approx((13.5 - 6) / 40)
    timeline.write()
    events = json.loads(file.read_text())["traceEvents"]
    lanes = {e["args"]["name"]: e["pid"] for e in events if e["ph"] == "M"}
    own = [e for e in events if e["ph"] == "X" and e["pid"] == lanes["validation"]]
    assert [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6, e["args"]) for e in own] == [
        ("validate", 100.0, 7.0, {"step": 6, "version": 6})
    ]
    assert {e["dur"] / 1e6 for e in events if e["name"] == "waits-for-validation"} == {2.0}
    assert [e["dur"] / 1e6 for e in events if e["name"] == "update" and e["pid"] == lanes["driver"]] == [2.0]


def test_workers_wait_for_engines_that_are_drained_before_the_weights_come(tmp_path: Path) -> None:
    """One engine samples all the step; another one, done at 109, is sent weights with it where they meet in a group."""
    file = tmp_path / "timeline.json"
    timeline = Timeline(file, 10)
    drains = ((105.0, 107.0), (107.5, 109.5))
    stages = StepStages(100.0, generated=99.0, scored=99.5, updated=105.0, end=110.0, drains=drains)
    busy = [
        reported("actor", 0, ("update", 100.0, 105.0), ("pack weights", 107.0, 107.5)),
        reported("rollout", 0, ("sample", 100.0, 110.0)),
        reported("rollout", 1, ("sample", 100.0, 109.0)),
    ]
    row = timeline.add(7, stages, busy)
    assert row["perf/waits_for/rollout"] == pytest.approx((4.0 + 0.5) / 30)  # the actor's two drains, and the engine's
    assert row["perf/waits_for/actor"] == pytest.approx((0.5 + 0.5) / 30)  # what is left of the push, of both
    assert contains_in_order(timeline.summary().split("; ")[0], "rollout")
    timeline.write()
    events = json.loads(file.read_text())["traceEvents"]
    lanes = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    by_lane = {(lanes[e["pid"]], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"}
    stages_of_step = {(name, start, length) for lane, name, start, length in by_lane if lane == "driver"}
    assert stages_of_step == {
        ("update", 100.0, 5.0), ("drain", 105.0, 2.0), ("sync", 107.0, 0.5), ("drain", 107.5, 2.0), ("sync", 109.5, 0.5)
    }  # fmt: skip
    assert {("actor 0", "waits-for-batch", 105.0, 2.0), ("actor 0", "waits-for-batch", 107.5, 2.0)} <= by_lane
    assert ("rollout 1", "waits-for-weights", 109.0, 0.5) in by_lane  # another engine holds them up


def test_the_file_is_a_trace_with_causes(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    timeline = Timeline(file, 10)
    timeline.add(7, STAGES, step_of_four())
    timeline.write()
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    lanes = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert list(lanes.values()) == ["driver", "actor 0", "rollout 0", "rollout 1", "teacher 0"]
    idle = {
        (lanes[e["pid"]], e["args"]["cause"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e.get("cat") == "idle"
    }
    assert ("actor 0", "batch", 100.0, 4.0) in idle
    assert ("actor 0", "teacher", 104.0, 1.0) in idle
    assert ("rollout 1", "tickets", 102.0, 2.0) in idle
    assert ("rollout 0", "weights", 105.0, 4.0) in idle
    assert ("teacher 0", "batch", 103.0, 0.5) in idle
    by_name = {e["name"]: e["args"]["step"] for e in events if e["ph"] == "X"}
    assert (by_name["validate"], by_name["sample"]) == (6, 7)  # it was between two steps
    assert {span["lane"] for span in read_spans(file)} == set(lanes.values())  # as the report reads it
    pace, waited = timeline.summary().split("; ")
    assert contains_in_order(pace, "actor") and contains_in_order(waited, "10 s")
    assert waited.partition(": ")[2] == "actor 5.5 s, rollout 6 s, teacher 6.5 s"


def test_no_event_of_a_lane_overlaps_the_next_one(tmp_path: Path) -> None:
    """Perfetto leaves such events out, by a microsecond as well."""
    timeline, bounds = Timeline(tmp_path / "timeline.json", 100), [1.8e9 + n * 0.0123457 for n in range(401)]
    for step, at in enumerate(range(0, 400, 4), 1):
        start, generated, scored, end = bounds[at : at + 4]
        begun = start - 5e-6 * (step % 2)  # of clocks that are read anew
        stages = StepStages(begun, generated, scored, scored, bounds[at + 4])
        spans = [("sample", start, generated), ("load weights", generated, scored), ("sample", end, bounds[at + 4])]
        timeline.add(step, stages, [reported("rollout", 0, *spans)])
    timeline.write()
    events = [e for e in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] if e["ph"] == "X"]
    for lane in {e["pid"] for e in events}:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["pid"] == lane)
        assert len(own) >= 300 and all(end <= start for (_, end), (start, _) in pairwise(own))


def test_a_run_that_goes_on_keeps_the_steps_before_and_forgets_those_that_are_done_again(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    first = Timeline(file, 3)
    for step in (1, 2, 3, 4):
        first.add(step, STAGES, [reported("actor", 0, ("update", 105.0, 109.0))])
    first.write()
    assert {e["args"]["step"] for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"} == {2, 3, 4}
    again = Timeline(file, 3, step=3)
    again.add(4, STAGES, [reported("actor", 0, ("again", 105.0, 109.0))])
    again.write()
    events = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["args"]["step"] for e in events} == {2, 3, 4}
    assert {e["name"] for e in events if e["args"]["step"] == 4 and e["cat"] == "busy"} >= {"again", "generate"}
    assert "update" not in {e["name"] for e in events if e["args"]["step"] == 4 and e["pid"] == 2}


def test_steps_of_many_events_are_fewer_and_a_line_states_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many times a step a scorer that is busy for moments begins and waits."""
    monkeypatch.setattr("gkd.observability.timeline.MAX_EVENTS", 100)
    caplog.set_level(logging.INFO, "gkd")
    file = tmp_path / "timeline.json"
    timeline = Timeline(file, 500)

    def steps_of_the_file() -> set[int]:
        timeline.write()
        return {e["args"]["step"] for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"}

    moments = [("score", 101 + i / 10, 101 + i / 10 + 0.05) for i in range(40)]
    timeline.add(1, STAGES, [reported("teacher", 0, *moments[:5])])
    assert steps_of_the_file() == {1} and caplog.messages == []
    timeline.add(2, STAGES, [reported("teacher", 0, *moments)])
    timeline.add(3, STAGES, [reported("teacher", 0, *moments)])
    assert steps_of_the_file() == {3}
    timeline.add(4, STAGES, [reported("teacher", 0, *moments, *moments)])  # alone more than all may have
    assert steps_of_the_file() == {4}
    (line,) = caplog.messages
    assert contains_in_order(line, "timeline.json", "trainer.n_timeline_steps=500", "100")


def test_a_file_that_cannot_be_written_is_a_warning_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timeline = Timeline(tmp_path / "missing" / "timeline.json", 3)
    timeline.add(1, STAGES, step_of_four())
    for _ in range(2):
        timeline.write()
    (message,) = caplog.messages
    assert contains_in_order(message, "timeline", tmp_path / "missing" / "timeline.json")


def test_a_clock_that_is_ahead_is_put_right(tmp_path: Path) -> None:
    """The worker's says 120.5 where the driver's is between 110 and 111: it is at least 9.5 s ahead."""
    row = Timeline(tmp_path / "t.json", 1).add(
        1, STAGES, [reported("actor", 0, ("update", 114.5, 118.5), clock=120.5, node="far")]
    )
    assert row["perf/busy/actor"] == pytest.approx(0.4)
    assert row["perf/waits_for/actor"] == pytest.approx(0.1)  # 105 to 109 are the update's; the push is waited for


@pytest.mark.parametrize(
    ("readings", "ahead"),
    [
        ([(110.4, 110.5, 110.6), (120.0, 150.0, 121.0)], 29.0),  # the node's is set
        ([(110.4, 120.5, 110.6), (120.0, 120.5, 121.0)], 0.0),
        (
            [(110.4, 110.5, 110.6), (120.0, 60.5, 61.0), (62.0, 62.5, 63.0)],
            0.0,
        ),  # the driver's, while the node is asked
        ([(110.4, 110.5, 110.6), (120.0, 120.5, 121.5)], 0.0),
        ([(110.4, 100.5, 110.6)], -9.9),
        ([(110.4, 115.5, 110.6), (120.0, 125.2, 121.5)], 4.9),  # of two that agree the closer one
    ],
)
def test_a_clock_that_is_set_is_put_right_from_then_on(
    readings: list[tuple[float, float, float]], ahead: float, tmp_path: Path
) -> None:
    timeline = Timeline(tmp_path / "timeline.json", 10)
    for step, (sent, clock, received) in enumerate(readings, 1):
        own = replace(reported("rollout", 0, clock=clock, node="far"), sent=sent, received=received)
        timeline.add(step, STAGES, [own])
    (sample,) = timeline.correct_times([training_sample(generated_s=ahead)], ["far"])
    assert sample.generated_s == pytest.approx(0.0)


def test_times_of_samples_are_by_the_drivers_clock_where_it_is_known(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json", 1)
    samples = [replace(training_sample(i), worker=i, generated_s=110.0 + i, scored_s=112.0 + i) for i in range(3)]
    assert timeline.correct_times(samples, ["near", "far", "new"]) == samples
    timeline.add(1, STAGES, [reported("rollout", 0), reported("rollout", 1, clock=120.5, node="far")])
    near, far, new = timeline.correct_times(samples, ["near", "far", "new"])
    assert (near, new) == (samples[0], samples[2])
    assert far == replace(samples[1], generated_s=101.5, scored_s=103.5)
    assert stage_metrics(100.0, [far]) == {"timing_s/generate": 1.5, "timing_s/score": 2.0}


def test_what_is_recorded_of_a_call_has_the_version_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gkd.cluster.workers.activity.HERE", here := Activity())

    @record_activity("update", lambda version: version)
    def update(version: int) -> None:
        time.sleep(0.001)

    here.switch("sample", 3)
    time.sleep(0.001)
    update(4)
    assert here.switch(None) == ("sample", 3)
    assert [(span.name, span.version) for span in here.take()[1]][:2] == [("sample", 3), ("update", 4)]


def test_scores_are_waited_for_by_the_name_of_who_is_last(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    for scorers, elsewhere, cause in (
        ([], "rewards", "rewards"), (["reward_model"], "rewards", "reward_model"), ([], "reference", "reference"),
    ):  # fmt: skip
        timeline = Timeline(file, 10, elsewhere=elsewhere)
        scored = [reported(name, 0, ("score", 103.0, 105.0)) for name in scorers]
        timeline.add(7, STAGES, [*step_of_four()[:3], *scored])
        timeline.write()
        names = {e["name"] for e in json.loads(file.read_text())["traceEvents"]}
        assert f"waits-for-{cause}" in names and "waits-for-teacher" not in names


def test_activity_is_cut_where_it_is_fetched_and_nested_ones_come_back() -> None:
    activity = Activity()
    assert activity.switch("sample", 3) == (None, None)
    time.sleep(0.01)
    clock, (span,) = activity.take()
    assert (span.name, span.version, span.end) == ("sample", 3, clock)
    activity.switch("load weights")
    activity.switch("sample", 4)
    activity.switch(None)
    later, spans = activity.take()
    assert [span.name for span in spans] == ["sample", "load weights", "sample"]
    assert spans[0].start == clock
    assert all(a.end == b.start for a, b in pairwise(spans)) and spans[-1].end <= later
    assert activity.take()[1] == []


def test_what_raises_is_noted_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from gkd.cluster.workers import activity as module

    here = Activity()
    monkeypatch.setattr(module, "HERE", here)

    @record_activity("update")
    def fails() -> None:
        assert threading.current_thread() is threading.main_thread()
        time.sleep(0.002)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    assert [span.name for span in here.take()[1]] == ["update"]
    time.sleep(0.002)
    assert here.take()[1] == []
