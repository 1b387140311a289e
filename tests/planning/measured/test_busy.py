"""What workers were busy for, from timelines made by hand, and the factors of a plan by it."""

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
from gkd.planning.measured.busy import MOST_PACES, busy_by_step, busy_seconds, paces_of
from gkd.planning.measured.factors import factors_of
from gkd.planning.measured.timeline import RunTimeline, TimelineSpan
from gkd.planning.simulation.run import Pace
from gkd.planning.simulation.steps import simulate_layout
from tests.planning.layouts import layout_of
from tests.weights.reports import report

Done = tuple[str, float, float]
# Seconds of a step of 20: two engines with 6 and 4, of which the actor works beside the last two and then waits.
STEP: dict[str, list[Done]] = {
    "rollout 0": [("sample", 0.0, 6.0), ("load weights", 12.0, 13.0)],
    "rollout 1": [("sample", 0.0, 1.0), ("sample", 2.0, 5.0), ("load weights", 12.0, 13.0)],
    "actor 0": [("update", 4.0, 6.0), ("update", 8.0, 9.0), ("send weights", 12.0, 13.0), ("save", 15.0, 19.0)],
}
SLOW: dict[str, list[Done]] = {**STEP, "rollout 0": [("sample", 0.0, 12.0)], "actor 0": [("update", 4.0, 12.0)]}


def write_timeline(folder: Path, *steps: dict[str, list[Done]]) -> Timeline:
    """Write steps of 20 s each, which waited for all of it: sampled and scored after 12 s."""
    timeline = Timeline(folder / "timeline.json", 100)
    for number, lanes in enumerate(steps):
        start = 1000.0 + 20 * number
        reports = []
        for lane, spans in lanes.items():
            group, _, rank = lane.partition(" ")
            its = [ActivitySpan(name, start + a, start + b) for name, a, b in spans]
            contents = {"memory": {}, "clock": start + 20, "spans": its}
            reports.append(WorkerReport(report(group, int(rank), "GPU-0"), start + 20, start + 20, contents))
        timeline.add(number + 1, StepStages(start, start + 12, start + 12, start + 13, start + 20), reports)
    timeline.write()
    return timeline


def test_a_groups_time_is_what_its_workers_worked_without_waits(tmp_path: Path) -> None:
    """The first step warms up, and the last one has no end in the file but its own."""
    write_timeline(tmp_path, SLOW, STEP, STEP, SLOW)
    assert busy_seconds(busy_by_step(RunTimeline.read(tmp_path), {})) == pytest.approx({"actor": 3.0, "rollout": 5.0})


def test_on_shared_devices_groups_have_half_of_them_while_both_work(tmp_path: Path) -> None:
    """Of the actor's 3 s two were beside sampling, of both engines and of one, which works on one of two devices."""
    write_timeline(tmp_path, SLOW, STEP, STEP, SLOW)
    seconds = busy_seconds(busy_by_step(RunTimeline.read(tmp_path), {"rollout": "actor"}))
    assert seconds == pytest.approx({"actor": 1 + 1 / 2 + 1 / 1.5, "rollout": (4 + 1 / 2 + 1 / 1.5 + 3 + 1 / 2) / 2})


def test_cores_that_have_room_for_both_slow_neither_down(tmp_path: Path) -> None:
    write_timeline(tmp_path, SLOW, STEP, STEP, SLOW)
    seconds = busy_seconds(busy_by_step(RunTimeline.read(tmp_path), {"rollout": "actor"}, at_once=2))
    assert seconds == pytest.approx({"actor": 3.0, "rollout": 5.0})


def test_sampling_that_the_host_sets_the_pace_of_is_slowed_by_half(tmp_path: Path) -> None:
    """Its devices work for half of its time: beside both engines the actor takes half as long again."""
    write_timeline(tmp_path, SLOW, STEP, STEP, SLOW)
    seconds = busy_seconds(busy_by_step(RunTimeline.read(tmp_path), {"rollout": "actor"}, shares={"rollout": 0.5}))
    one, both = 1 / 1.125, 1 / 1.25
    assert seconds == pytest.approx({"actor": 1 + 1 / 1.5 + 1 / 1.25, "rollout": (4 + both + one + 3 + both) / 2})


def test_paces_are_each_steps_share_of_the_mean(tmp_path: Path) -> None:
    write_timeline(tmp_path, STEP, STEP, SLOW, STEP)
    paces = paces_of(busy_by_step(RunTimeline.read(tmp_path), {}))
    means = (5.0 + 8.0) / 2, (3.0 + 8.0) / 2
    assert paces == (Pace(5.0 / means[0], 1.0, 3.0 / means[1]), Pace(8.0 / means[0], 1.0, 8.0 / means[1]))
    assert paces_of([]) == ()
    assert paces_of([{"rollout": 9.0}] + [{"rollout": 1.0}] * MOST_PACES) == (Pace(),) * MOST_PACES  # of the last ones


def test_steps_that_the_file_lacks_are_not_taken_for_a_long_one() -> None:
    """As where a run went on without what it had written before."""
    spans = [TimelineSpan("driver", "generate", 10.0 * step, 10.0 * step + 9, step) for step in (1, 2, 3, 6, 7)]
    assert RunTimeline(("driver",), tuple(spans)).steps() == [(20.0, 30.0), (60.0, 70.0)]


def test_steps_with_a_validation_beside_them_do_not_count(tmp_path: Path) -> None:
    timeline = write_timeline(tmp_path, STEP, STEP, SLOW, SLOW, STEP, STEP)
    timeline.add_validation(2, 1045.0, 1061.0)
    timeline.write()
    assert busy_seconds(busy_by_step(RunTimeline.read(tmp_path), {})) == pytest.approx({"actor": 3.0, "rollout": 5.0})
    timeline.add_validation(2, 1000.0, 1200.0)
    timeline.write()
    assert busy_seconds(busy_by_step(RunTimeline.read(tmp_path), {})) == {}


def test_a_run_without_a_timeline_has_none_and_a_broken_one_is_named(tmp_path: Path) -> None:
    assert busy_seconds(busy_by_step(RunTimeline.read(tmp_path), {})) == {}
    (tmp_path / "timeline.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    with pytest.raises(ConfigError, match=r"timeline\.json"):
        busy_seconds(busy_by_step(RunTimeline.read(tmp_path), {}))


def test_the_simulation_of_a_run_has_its_stages_own_times(tmp_path: Path) -> None:
    """The driver's times say 12 s of sampling, which waits are most of; without the file the plan has these."""
    overrides = ("+recipe=grpo", "model.size=1.5b", "plan.gpu_type=h200", "schedule.streaming=false",
                 "rollout.n_gpus_per_node=2")  # fmt: skip
    layout = layout_of(*overrides)
    (tmp_path / "config.yaml").write_text(dump_yaml(layout.config))
    row = {"response/length_mean": 100.0, "response/length_max": 100.0, "timing_s/generate": 12.0,
           "timing_s/score": 0.0, "timing_s/update": 8.0, "timing_s/sync": 0.5}  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": s, **row}) + "\n" for s in (1, 2, 3)))
    seconds = {}
    for source in ("metrics.jsonl", "timeline.json"):
        factors = factors_of(str(tmp_path), layout)
        step = simulate_layout(replace(layout, config=factors.lengths(layout.config)), 0, factors)
        seconds[source] = step.seconds
        write_timeline(tmp_path, SLOW, STEP, STEP, SLOW)
    assert seconds == pytest.approx({"metrics.jsonl": 12 + 8 + 0.5, "timeline.json": 5 + 3 + 0.5}, rel=0.01)
    assert step.busy == pytest.approx({"rollout": 5.5, "actor": 3.5}, rel=0.01)
