"""The driver's own times and its messages, from timelines made by hand, and the steps that they make."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gkd.cluster.workers.activity import ActivitySpan
from gkd.cluster.workers.reports import WorkerReport
from gkd.config.loading import dump_yaml
from gkd.errors import ConfigError
from gkd.observability.timeline import StepStages, Timeline
from gkd.planning.advice.report import plan
from gkd.planning.layout import Layout
from gkd.planning.measured.driver import LOADING, driver_times
from gkd.planning.measured.factors import factors_of
from gkd.planning.measured.timeline import RunTimeline
from gkd.planning.simulation.run import DriverTimes
from gkd.planning.simulation.stages import Factors
from gkd.planning.simulation.steps import run_of, simulate_layout
from tests.planning.layouts import layout_of
from tests.weights.reports import report

Done = tuple[str, float, float]
LENGTH, SYNC = 17.0, 1.0
# Engines begin a second after the driver, which logs beside them; each side waits for the other's messages.
DRIVER: list[Done] = [("request", 0.0, 0.5), ("log", 0.5, 2.0), ("prepare", 7.5, 9.0), ("log samples", 9.0, 12.0)]
WORKERS: dict[str, list[Done]] = {
    "rollout": [("sample", 1.0, 7.0), ("load weights", 16.0, 17.0)],
    "actor": [("update", 9.25, 15.25), ("send weights", 16.0, 17.0)],
}
ROW = {"response/length_mean": 55.0, "response/length_max": 100.0, "timing_s/update": 8.0}
AT_0 = DriverTimes(start_s=1.0, record_s=2.0, deliver_s=0.5, prepare_s=1.5, call_s=0.25 + 0.75)


def write_run(folder: Path, layout: Layout, *rows: dict[str, float]) -> None:
    """Write settings and metrics of a run of ``layout``."""
    (folder / "config.yaml").write_text(dump_yaml(layout.config))
    lines = (json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows, 1))
    (folder / "metrics.jsonl").write_text("".join(lines))


def write_timeline(folder: Path, driver: list[Done], workers: dict[str, list[Done]], scored: float) -> None:
    timeline = Timeline(folder / "timeline.json", 100)
    for number in range(4):
        start = 1000.0 + LENGTH * number
        own = {lane: [ActivitySpan(name, start + a, start + b) for name, a, b in spans]
               for lane, spans in {"driver": driver, **workers}.items()}  # fmt: skip
        end = start + LENGTH
        reports = [
            WorkerReport(report(group, 0, "GPU-0"), end, end, {"memory": {}, "clock": end, "spans": own[group]})
            for group in workers
        ]
        stages = StepStages(start, start + scored, start + scored, end - SYNC, end)
        timeline.add(number + 1, stages, reports, own["driver"])
    timeline.write()


def test_each_is_what_passes_while_nobody_the_driver_waits_for_works(tmp_path: Path) -> None:
    write_timeline(tmp_path, DRIVER, WORKERS, scored=7.0)
    assert driver_times(RunTimeline.read(tmp_path)) == AT_0


def test_an_engine_is_held_from_its_first_bucket_to_its_last(tmp_path: Path) -> None:
    """By hand: of a push of a second."""
    buckets = [("load weights", 16.25, 16.375), ("load weights", 16.5, 16.625)]
    workers = {**WORKERS, "rollout": [*WORKERS["rollout"][:1], *buckets]}
    write_timeline(tmp_path, DRIVER, workers, scored=7.0)
    timeline = RunTimeline.read(tmp_path)
    assert driver_times(timeline) == replace(AT_0, spared_s=1.0 - 0.375)
    others = [replace(span, lane="rollout 1", end=span.end + 0.125) for span in timeline.spans if span.name == LOADING]
    both = replace(timeline, spans=(*timeline.spans, *others))
    assert driver_times(both).spared_s == pytest.approx(1.0 - (0.375 + 0.5) / 2)


def test_with_offload_a_step_is_logged_before_the_next_one_begins(tmp_path: Path) -> None:
    """Engines are woken after the log, so that all of it passes before they begin."""
    driver: list[Done] = [("prepare", 6.5, 8.0), ("request", 15.0, 15.5), ("log", 15.5, LENGTH)]
    workers: dict[str, list[Done]] = {
        "rollout": [("sample", 1.0, 6.0), ("load weights", 14.0, 15.0)],
        "actor": [("update", 8.25, 13.25), ("send weights", 14.0, 15.0)],
    }
    write_timeline(tmp_path, driver, workers, scored=6.0)
    times = driver_times(RunTimeline.read(tmp_path))
    assert (times.start_s, times.record_s, times.prepare_s) == (2.0 + 1.0, 2.0, 1.5)
    assert times.deliver_s <= 0.5


def test_steps_in_which_workers_ended_are_left_out(tmp_path: Path) -> None:
    write_timeline(tmp_path, DRIVER, WORKERS, scored=7.0)
    assert len(RunTimeline.read(tmp_path).steps()) == 2  # of four: the first warms up, and the last has no end
    events = [{"kind": "death", "step": 2}, {"kind": "checkpoint", "step": 3}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"kind": "dea')
    assert RunTimeline.read(tmp_path).steps() == [(1000 + 2 * LENGTH, 1000 + 3 * LENGTH)]


def test_metrics_of_steps_in_which_workers_ended_are_left_out(tmp_path: Path) -> None:
    layout = layout_of("+recipe=grpo", "model.size=1.5b", "plan.gpu_type=h200")
    write_run(tmp_path, layout, *({**ROW, "timing_s/sync": seconds} for seconds in (1.0, 1.0, 12.0, 1.0)))
    slow = factors_of(str(tmp_path), layout).sync
    (tmp_path / "events.jsonl").write_text('{"kind": "restart", "step": 3}\n')
    assert factors_of(str(tmp_path), layout).sync == pytest.approx(slow * 3 / 14)


def test_a_torn_line_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of("+recipe=grpo", "model.size=1.5b", "plan.gpu_type=h200")
    write_run(tmp_path, layout, ROW, ROW)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "timing')
    (tmp_path / "samples.jsonl").write_text('{"length": 7}\n' * 64 + '{"leng')
    assert factors_of(str(tmp_path), layout).measured_lengths == (7,) * 64
    with monkeypatch.context() as short:  # of a file that is longer than what is read, the first line is torn as well
        short.setattr("gkd.planning.measured.factors.SAMPLES_READ", 64 * len('{"length": 7}\n') + 5)
        (tmp_path / "samples.jsonl").write_text('{"length": 7}\n' * 70)
        assert factors_of(str(tmp_path), layout).measured_lengths == (7,) * 64
    (tmp_path / "samples.jsonl").write_text('{"leng\n' + '{"length": 7}\n' * 64)
    with pytest.raises(ConfigError, match=r"samples\.jsonl"):  # in the middle it is no run's file
        factors_of(str(tmp_path), layout)
    (tmp_path / "samples.jsonl").unlink()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "timing\n{}\n')
    with pytest.raises(ConfigError):
        factors_of(str(tmp_path), layout)


def test_what_a_runs_times_leave_out_is_noted() -> None:
    layout = layout_of("+recipe=grpo", "model.size=1.5b", "plan.gpu_type=h200", "schedule.max_staleness=1")

    def noted(factors: Factors, text: str) -> bool:
        return any(text in note for note in plan(layout, factors, None, False).notes())

    assert noted(Factors(staleness=1), "timeline.json")
    assert not noted(Factors(staleness=1, driver=AT_0), "that run")
    assert noted(Factors(staleness=0, driver=AT_0), "schedule.max_staleness=0")


def test_what_was_ahead_and_chunks_that_were_begun_are_waited_for_no_more(tmp_path: Path) -> None:
    """Engines that go on have no start, and a batch that lay there is taken in after the log."""
    driver: list[Done] = [("request", 0.0, 0.5), ("log", 0.5, 2.0), ("prepare", 2.25, 4.0)]
    workers: dict[str, list[Done]] = {
        "rollout": [("sample", 0.0, 16.0)],
        "actor": [("update", 3.0, 10.0), ("update", 10.25, 15.5)],
    }
    write_timeline(tmp_path, driver, workers, scored=0.0)
    times = driver_times(RunTimeline.read(tmp_path))
    assert times == DriverTimes(start_s=0.0, record_s=2.0, deliver_s=0.25, prepare_s=1.75, call_s=0.25 + 0.5)


def test_answers_that_nobody_samples_are_made_by_the_driver(tmp_path: Path) -> None:
    driver: list[Done] = [("request", 0.0, 0.5), ("log", 0.5, 2.0), ("prepare", 5.0, 6.5)]
    write_timeline(tmp_path, driver, {"actor": [("update", 6.5, 16.0)], "rollout": []}, scored=5.0)
    times = driver_times(RunTimeline.read(tmp_path))
    assert times == DriverTimes(record_s=2.0, deliver_s=3.0, prepare_s=1.5)


def test_a_timeline_without_the_driver_has_none(tmp_path: Path) -> None:
    assert driver_times(RunTimeline.read(tmp_path)) == DriverTimes()
    write_timeline(tmp_path, [], WORKERS, scored=7.0)
    assert driver_times(RunTimeline.read(tmp_path)) == DriverTimes()


@pytest.mark.parametrize(
    ("staleness", "seconds"),
    [(0, LENGTH), (1, 2 + 1.5 + 6 + 1 + SYNC)],  # the actor is the longer side; what is logged is waited for
)
def test_the_simulation_of_a_run_has_its_drivers_times(tmp_path: Path, staleness: int, seconds: float) -> None:
    layout = layout_of("+recipe=grpo", "model.size=1.5b", "plan.gpu_type=h200", "schedule.streaming=false")
    row = {"response/length_mean": 100.0, "response/length_max": 100.0, "timing_s/update": 8.0, "timing_s/sync": SYNC}
    write_run(tmp_path, layout, row, row, row)
    write_timeline(tmp_path, DRIVER, WORKERS, scored=7.0)
    factors = factors_of(str(tmp_path), layout)
    assert factors.driver == AT_0
    step = simulate_layout(replace(layout, config=factors.lengths(layout.config)), staleness, factors)
    assert step.seconds == pytest.approx(seconds, rel=0.01)
    assert step.busy == pytest.approx({"rollout": 6 + SYNC, "actor": 6 + SYNC}, rel=0.01)


def test_in_flight_engines_are_as_busy_in_the_simulation_as_they_were(tmp_path: Path) -> None:
    """With half of a push, in which they loaded, and which is no sampling."""
    layout = layout_of(
        "+recipe=grpo", "model.size=1.5b", "plan.gpu_type=h200", "schedule.max_staleness=1", "schedule.in_flight=true"
    )
    row = {"response/length_mean": 100.0, "response/length_max": 100.0, "timing_s/update": 8.0, "timing_s/sync": SYNC}
    write_run(tmp_path, layout, row, row, row)
    workers = {**WORKERS, "rollout": [*WORKERS["rollout"][:1], ("load weights", 16.25, 16.75)]}
    write_timeline(tmp_path, DRIVER, workers, scored=7.0)
    factors = factors_of(str(tmp_path), layout)
    step = simulate_layout(replace(layout, config=factors.lengths(layout.config)), 1, factors)
    assert step.busy["rollout"] == pytest.approx(6 + 0.5, rel=0.01)


def test_responses_are_as_long_as_those_that_the_run_logged(tmp_path: Path) -> None:
    """A lognormal distribution, which is what the metrics alone say, has few as long as the longest."""
    layout = layout_of("+recipe=grpo", "model.size=1.5b", "plan.gpu_type=h200", "trainer.batch_size=16", "rollout.n=4")
    write_run(tmp_path, layout, ROW, ROW)
    lengths = [10, 100] * 64
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps({"length": length}) + "\n" for length in lengths))
    factors = factors_of(str(tmp_path), layout)
    ran = replace(layout, config=factors.lengths(layout.config))
    assert sorted(run_of(ran, 0, factors).lengths(1)) == [10.0] * 32 + [100.0] * 32
    assert max(run_of(ran, 0, replace(factors, measured_lengths=())).lengths(1)) == pytest.approx(100, rel=0.2)
    short = replace(ran, config=ran.config.with_settings({"rollout.max_response_length": 60}))
    assert sorted(run_of(short, 0, factors).lengths(1)) == [10.0] * 32 + [60.0] * 32
    shorter = replace(ran, config=ran.config.with_settings({"rollout.max_response_length": 40}))
    assert sorted(run_of(shorter, 0, factors).lengths(1)) == [10.0] * 32 + [40.0] * 32
    assert (ran.workload.response, shorter.workload.response) == (55, 40)
    fixed_length = layout_of("+recipe=grpo", "model.size=1.5b", "plan.gpu_type=h200", "plan.response_length=250")
    assert min(run_of(fixed_length, 0, factors).lengths(1)) > 100  # what is asked for goes before what was


def test_training_on_given_answers_waits_for_the_driver_after_every_update() -> None:
    layout = layout_of("+recipe=sft", "model.size=1.5b", "plan.gpu_type=h200")
    planned = simulate_layout(layout, 0)
    measured = simulate_layout(layout, 0, Factors(driver=AT_0))
    assert measured.seconds == pytest.approx(planned.seconds + 2 + 0.5 + 1.5 + 1)
