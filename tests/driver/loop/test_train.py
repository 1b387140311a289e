"""The loop: what a step does in which order, what it logs, and what is left when a part fails.

The groups are played by functions; prompts, batches, advantages, metrics and their files are the run's own.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gkd.cluster.workers.activity import HERE
from gkd.config import Config, load
from gkd.config.validating import StopEarly
from gkd.data.model_info import ModelInfo
from gkd.data.stream import PromptStream
from gkd.driver.checkpoints.checkpoint import RunState
from gkd.driver.checkpoints.saving import Checkpoints
from gkd.driver.loop.parts import RunLog
from gkd.driver.loop.train import StepTimes, _push, train
from gkd.driver.validation.early_stop import EarlyStop
from gkd.durable import DirectoryIdentity
from gkd.errors import RunFailed
from gkd.observability.metrics import JsonLines
from gkd.observability.timeline import Timeline
from gkd.types import SampleRequest, TrainingSample, VersionSpan
from tests.driver.loop.test_collect import PROMPTS, Engines, grpo
from tests.samples import training_sample

REPORT = SimpleNamespace(
    worker=SimpleNamespace(group="actor", rank=0, node="here"), sent=0.0, received=1.0,
    contents={"memory": {"process_gb": 1.0}, "clock": 0.5, "spans": []},
)  # fmt: skip


def three_steps(max_staleness: int = 0, rounds: int = 1) -> Config:
    config = grpo(rounds)
    trainer = config.trainer.model_copy(update={"total_steps": 3, "val_every": 2})
    schedule = config.schedule.model_copy(update={"max_staleness": max_staleness})
    return config.model_copy(update={"trainer": trainer, "schedule": schedule})


class Arrays:
    """What stands for the arrays of a sample in the object store."""


@dataclass
class Played:
    """Every group of a run; one of ``fails`` raises, in the step that is named with it."""

    output: Path
    fails: tuple[str, int] = ("", 0)
    max_staleness: int = 0
    offload: bool = False
    logging_s: float = 0.0
    sampling_s: float = 0.0
    pushing_s: float = 0.0
    draining_s: float = 0.0
    ordered: int = 0
    calls: list[tuple[str, float]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    version: int = 0
    step: int = 0
    sets_at: tuple[int, ...] = ()
    supervised: bool = False
    rounds: int = 1
    worth: Callable[[SampleRequest], float] = lambda request: float(request.index)
    most: int = 8
    """Samples of which the actor holds so many at a time."""
    behind: int = 0  # updates, that samples are
    beside: Callable[[], None] | None = None
    group: Any = field(default_factory=lambda: SimpleNamespace(reports=()))
    arrays: list[weakref.ref[Arrays]] = field(default_factory=list)
    held_at_push: list[int] = field(default_factory=list)

    def note(self, call: str, step: int | None = None) -> None:
        self.calls.append((call, self.step if step is None else step))
        if self.fails == self.calls[-1]:
            raise RunFailed(f"{call} failed")

    def submit(self, requests: Sequence[Any], order: int = 0) -> list[Any]:
        self.calls.append(("sample", order))
        self.ordered = order
        self.seeds += [request.seed for request in requests]
        return list(requests)

    def collect_in_order(self, requests: Sequence[Any], timeout_s: float) -> Iterator[list[Any]]:
        self.step = self.ordered if self.rounds > 1 else self.step + 1
        self.note("collect")
        samples = Engines(self.worth).finished(requests)
        if self.rounds > 1:
            time.sleep(self.sampling_s)
            samples = [replace(sample, generated_s=time.time(), scored_s=time.time()) for sample in samples]
        version = 0 if self.supervised else max(0, self.version - self.behind)
        held = [replace(sample, ref=Arrays(), versions=(VersionSpan(0, 1, version),)) for sample in samples]
        self.arrays += [weakref.ref(sample.ref) for sample in held]
        yield held

    def fits(self, samples: Sequence[TrainingSample]) -> bool:
        return len(samples) <= self.most

    def accumulate(self, chunks: Sequence[Sequence[Any]]) -> None:
        self.calls += [("accumulate", self.step) for _ in chunks]

    def apply(self, step: int) -> dict[str, float]:
        assert self.calls.count(("accumulate", step)) == 2
        return self.update([None] * 8, step)

    def update(self, batch: Sequence[Any], step: int) -> dict[str, float]:
        assert step == self.step and len(batch) == 8
        self.note("update")
        assert self.beside is not None
        self.beside()
        self.beside = None
        self.version = step
        return {"actor/loss": 0.5 * step}

    def push_drained(self, request: Callable[[], None]) -> list[tuple[float, float]]:
        began = time.monotonic()
        self.note("drain")
        time.sleep(self.draining_s)
        waited = (began, time.monotonic())
        self.push()
        request()
        return [waited]

    def wait_for_chunks(self) -> None:
        assert self.supervised  # before engines get weights for validations alone

    def attend(self, calls: Sequence[Any]) -> None:
        raise AssertionError("the actor is played, and done at once")

    def push(self) -> None:
        self.note("push")
        time.sleep(self.pushing_s)
        self.held_at_push.append(sum(arrays() is not None for arrays in self.arrays))

    def sets_due(self, step: int, rest: bool = False) -> list[int]:
        return [step] if (step in self.sets_at) != rest else []

    def request(self, order: float) -> int:
        """A validation of the present weights."""
        self.calls.append(("request", order - 1.5))  # ahead of what is requested for steps after the next
        return self.version

    def measure(self, version: int) -> dict[str, float]:
        assert version == self.version  # the actor has the weights that are measured
        self.note("validate", version)
        return {"val/accuracy": 0.1 * version}

    def request_sets(self, due: list[int], order: float) -> list[int]:
        self.calls += [("request", order - 1.5)] if due else []
        return due

    def measure_sets(self, due: list[int]) -> dict[str, float]:
        return {"val/hard/accuracy": due[0] / 100} if due else {}

    def shown(self, step: int, row: dict[str, float]) -> None:
        assert self.rows()[-1]["step"] == step  # what is shown is in the file
        self.note("show", step)
        time.sleep(self.logging_s)

    def rows(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.output / "metrics.jsonl").read_text().splitlines()]

    def run(self, start: RunState, stop_early: dict[str, Any] | None = None) -> dict[str, float]:
        config = three_steps(self.max_staleness, self.rounds)
        cluster = config.cluster.model_copy(update={"offload": self.offload})
        config = config.model_copy(update={"cluster": cluster})
        if self.supervised:
            trainer = {"batch_size": 8, "total_steps": 3, "val_every": 3}
            config = load({"algorithm": {"name": "sft"}, "trainer": trainer})
        parts: Any = SimpleNamespace(
            prompts=PromptStream(PROMPTS, seed=0), rollout=self, actor=self, sync=self,
            model=ModelInfo(50, None, [], 50), n_gpus=2,
            device="cpu",
            validation=SimpleNamespace(request=self.request, measure=self.measure),
            val_sets=SimpleNamespace(
                request=self.request_sets, measure=self.measure_sets, sets=[SimpleNamespace(name="hard")],
                select_due_sets=self.sets_due,
            ),
            report=lambda: [REPORT], answers=self if self.supervised else None,
        )  # fmt: skip
        samples: Any = SimpleNamespace(write=lambda step, batch: self.note("log samples"))
        progress: Any = SimpleNamespace(step=self.shown)
        checkpoints = Checkpoints(config, DirectoryIdentity.of(self.output), time.monotonic(), {}, start.step)
        file = self.output / "metrics.jsonl"
        stop = EarlyStop(StopEarly(**(stop_early or {})), file)
        with JsonLines(file) as metrics:
            timeline = Timeline(self.output / "timeline.json", 3)
            log = RunLog(metrics, samples, progress, checkpoints, timeline, None, stop)
            validated = train(config, parts, log, start).validated
            timeline.write()
            return validated


def test_sets_have_intervals_of_their_own_and_the_last_figures_of_each_stay(tmp_path: Path) -> None:
    run = Played(tmp_path, sets_at=(1, 2))
    assert run.run(RunState()) == pytest.approx({"val/hard/accuracy": 0.02, "val/accuracy": 0.3})
    assert [row.get("val/hard/accuracy") for row in run.rows()] == [0.01, 0.02, None]


def test_a_figure_that_the_last_validation_lacks_is_not_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the share of failed rewards, which is measured where some failed."""
    run, failed = Played(tmp_path), {"val/reward/accuracy/failed": 0.5}
    monkeypatch.setattr(
        run, "measure", lambda version: {"val/accuracy": 0.1 * version} | (failed if version == 2 else {})
    )
    assert run.run(RunState()) == pytest.approx({"val/accuracy": 0.3})
    assert [row.get(*failed) for row in run.rows()] == [None, 0.5, None]


def test_a_run_that_does_not_get_better_ends_with_every_figure_and_goes_on_to_nothing(tmp_path: Path) -> None:
    stop = {"metric": "val/hard/accuracy", "patience": 1, "min_delta": 0.01}
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val/hard/accuracy": 0.0}\n')
    run = Played(tmp_path, sets_at=(1,))
    assert run.run(RunState(), stop) == pytest.approx({"val/hard/accuracy": 0.01, "val/accuracy": 0.1})
    assert [row["step"] for row in run.rows()] == [0, 1]
    again = Played(tmp_path, step=1)
    again.run(RunState(step=1), stop)
    assert [call for call, _ in again.calls] == []
    again.run(RunState(step=1), {**stop, "patience": 2})  # longer patience goes on
    assert [row["step"] for row in run.rows()] == [0, 1, 2, 3]


def test_weights_are_pushed_before_a_step_is_validated_and_logged(tmp_path: Path) -> None:
    run = Played(tmp_path)
    assert run.run(RunState()) == pytest.approx({"val/accuracy": 0.3})  # the last validation
    then = ("update", "log samples", "push")
    assert run.calls == [
        ("sample", 1), ("collect", 1), *((call, 1) for call in then), ("sample", 2), ("show", 1),
        # What measures the weights after step 2 is sampled beside step 3 and over before its update.
        ("collect", 2), *((call, 2) for call in then), ("sample", 3), ("request", 2),
        ("collect", 3), ("validate", 2), ("show", 2), *((call, 3) for call in then),
        ("request", 3), ("validate", 3), ("show", 3),
    ]  # fmt: skip
    assert len(run.seeds) == len(set(run.seeds)) == 3 * 8


def test_the_timeline_has_what_the_driver_itself_does(tmp_path: Path) -> None:
    """A plan takes its times from these; the last step's log is not in the file any more."""
    HERE.take()
    Played(tmp_path).run(RunState())
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    (lane,) = (event["pid"] for event in events if event["ph"] == "M" and event["args"]["name"] == "driver 0")
    own = [(event["name"], event["args"]["step"]) for event in events if event["ph"] == "X" and event["pid"] == lane]
    for step in (2, 3):  # by when it is done, that is after the push of the step before
        assert {name for name, its in own if its == step} >= {"request", "log", "prepare", "log samples"}
    assert ("validate", 3) in own


def test_engines_that_only_validate_get_weights_for_that_alone(tmp_path: Path) -> None:
    run = Played(tmp_path, supervised=True, sets_at=(2,), pushing_s=0.05)
    run.run(RunState())
    assert [call for call in run.calls if call[0] in ("update", "push", "validate")] == [
        ("update", 1), ("update", 2), ("push", 2), ("update", 3), ("push", 3), ("validate", 3),
    ]  # fmt: skip
    assert [row["staleness/max"] for row in run.rows()] == [0, 1, 2]
    for row in run.rows():  # nothing is sampled, and the push counts where other recipes' does
        assert not {"timing_s/generate", "timing_s/score"} & row.keys()
        assert ("perf/waits_for/rollout" in row) == ("timing_s/validation" in row)
    assert [row["timing_s/sync"] >= 0.05 for row in run.rows()] == [False, True, True]


def test_the_arrays_of_a_batch_are_let_go_of_with_its_update(tmp_path: Path) -> None:
    """Otherwise the targets of two steps are in the object store while the second one is sampled."""
    run = Played(tmp_path)
    run.run(RunState())
    assert len(run.arrays) == 3 * 8 and run.held_at_push == [0, 0, 0]


def test_a_row_has_what_every_part_measured(tmp_path: Path) -> None:
    run = Played(tmp_path)
    run.run(RunState())
    rows = run.rows()
    assert [(row["step"], row["actor/loss"]) for row in rows] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert [row["epoch"] for row in rows] == pytest.approx([0.04, 0.08, 0.12])  # of 100 prompts, 4 a step
    assert [row.get("val/accuracy") for row in rows] == [None, pytest.approx(0.2), pytest.approx(0.3)]
    for row in rows:
        assert row["reward/mean"] == 0.5 and row["advantage/mean"] == 0.0
        assert row["memory/actor/process_gb"] == 1.0
        assert row["timing_s/step"] >= row["timing_s/update"] + row["timing_s/sync"]
        assert row["perf/tokens_per_second"] == pytest.approx(2 * row["perf/tokens_per_second_per_gpu"])


def test_what_dynamic_sampling_left_out_took_its_time_and_is_what_the_student_writes(tmp_path: Path) -> None:
    def worth(request: SampleRequest) -> float:
        return float(request.index and request.prompt.id % 2)  # the even prompts are left out

    run = Played(tmp_path, rounds=20, worth=worth, sampling_s=0.05)
    HERE.take()
    run.run(RunState())
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    drawn = [
        sum(call == ("collect", step) for call in run.calls) for step in (1, 2, 3)
    ]  # rounds of each step, the last one after all others
    assert max(drawn) > 1
    for row, n_rounds in zip(run.rows(), drawn, strict=True):
        assert row["reward/groups"] > 4 or n_rounds == 1
        assert row["reward/equal_groups"] == pytest.approx(1 - 4 / row["reward/groups"])
        assert row["timing_s/generate"] > 0.05 * n_rounds
        n_tokens = training_sample().n_tokens * 2 * row["reward/groups"]
        assert row["perf/tokens_per_second"] * row["timing_s/step"] == pytest.approx(n_tokens)
        (lane,) = (e["pid"] for e in events if e["ph"] == "M" and e["args"]["name"] == "driver")
        (sampled,) = (
            e["dur"] / 1e6
            for e in events
            if e["ph"] == "X" and (e["pid"], e["name"], e["args"]["step"]) == (lane, "generate", row["step"])
        )
        assert sampled > 0.05 * n_rounds


def test_a_sample_older_or_newer_than_is_allowed_ends_the_run_before_it_is_learned_from(
    tmp_path: Path,
) -> None:
    run = Played(tmp_path, max_staleness=1, behind=1)
    run.run(RunState())
    assert [row["staleness/max"] for row in run.rows()] == [0, 1, 1]
    run = Played(tmp_path / "older", max_staleness=1, behind=2)
    run.output.mkdir()
    with pytest.raises(RunFailed, match=r"^sample 0 of prompt .*version 0, 2 updates behind .*max_staleness=1\)"):
        run.run(RunState())
    assert ("update", 2) in run.calls and ("update", 3) not in run.calls
    run = Played(tmp_path / "newer", behind=-1)
    run.output.mkdir()
    with pytest.raises(RunFailed, match=r"^sample 0 of prompt .*version 1\b.* 0$"):
        run.run(RunState())
    assert not any(name == "update" for name, *_ in run.calls)


@pytest.mark.parametrize(("max_staleness", "first", "then"), [(1, [1, 2], [[3], []]), (2, [1, 2, 3], [[], []])])
def test_later_steps_are_sampled_during_an_update_and_their_weights_come_between(
    max_staleness: int, first: list[int], then: list[list[int]], tmp_path: Path
) -> None:
    run = Played(tmp_path, max_staleness=max_staleness, draining_s=0.05)
    run.run(RunState())
    order = [call for call in run.calls if call[0] in ("sample", "update", "drain", "push")]
    expected = [("sample", step) for step in first]
    for step, further in enumerate([*then, []], 1):  # everything requested is sampled before weights change
        expected += [("update", step), ("drain", step), ("push", step), *(("sample", later) for later in further)]
    assert order == expected
    assert len(run.seeds) == len(set(run.seeds)) == 3 * 8
    rows = run.rows()
    assert [row["epoch"] for row in rows] == pytest.approx([0.04, 0.08, 0.12])  # what is trained, not what is ahead
    for row in rows:
        parts = ("wait", "update", "drain", "sync")
        assert row["timing_s/step"] == pytest.approx(sum(row[f"timing_s/{part}"] for part in parts), abs=1e-3)
        assert row["timing_s/drain"] >= 0.05 and row["perf/waits_for/rollout"] > 0  # the actor's, meanwhile


@pytest.mark.parametrize(
    ("computed", "expected"),
    [
        (None, {"wait": 5.0, "update": 2.0}),  # of one chunk
        (4.5, {"wait": 2.5, "update": 4.5, "overlap": 2.5}),
        (1.5, {"wait": 5.0, "update": 2.0, "overlap": 0.0}),  # all of it after the last sample
        (8.0, {"wait": 0.0, "update": 7.0, "overlap": 5.0}),  # by its own clock longer than there was time for
    ],
)
def test_what_the_actor_computes_before_the_batch_is_complete_is_no_wait(
    computed: float | None, expected: dict[str, float]
) -> None:
    timings = StepTimes(10.0, ready=15.0, updated=17.0, done=18.0).timings(computed)
    assert timings == {f"timing_s/{name}": seconds for name, seconds in {**expected, "sync": 1.0, "step": 8.0}.items()}


def test_a_step_is_sampled_while_the_one_before_is_validated_and_logged_unless_the_engines_sleep(
    tmp_path: Path,
) -> None:
    def handed_out_before_logging(**settings: Any) -> list[int]:
        run = Played(tmp_path / str(len(list(tmp_path.iterdir()))), **settings)
        run.output.mkdir()
        run.run(RunState())
        return [step for step in (2, 3) if run.calls.index(("sample", step)) < run.calls.index(("show", step - 1))]

    assert handed_out_before_logging() == [2, 3]  # step 2 is validated
    assert handed_out_before_logging(offload=True) == [3]  # for the validation the engines were woken


def test_a_step_that_was_handed_out_while_another_was_logged_is_timed_from_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]

    def pass_s(seconds: float = 0.001) -> float:
        now[0] += seconds
        return now[0]

    monkeypatch.setattr("gkd.driver.loop.train.time", SimpleNamespace(monotonic=pass_s, time=time.time))
    monkeypatch.setattr(f"{__name__}.time", SimpleNamespace(monotonic=time.monotonic, sleep=pass_s))
    run = Played(tmp_path, logging_s=0.5)
    run.run(RunState())
    first, second, third = (row["timing_s/step"] for row in run.rows())
    assert second > 0.5 < third and first < 0.5
    waited = [row.get("timing_s/validation") for row in run.rows()]
    assert waited[:2] == [None, None] and waited[2] is not None and third > waited[2] > 0.5  # that of step 2


def test_the_actor_has_what_there_is_of_a_step_before_the_one_before_is_logged(tmp_path: Path) -> None:
    run = Played(tmp_path, max_staleness=1, most=4)
    run.run(RunState())
    order = [call for call in run.calls if call[0] in ("accumulate", "update", "push", "show")]
    assert order == [
        ("accumulate", 1), ("accumulate", 1), ("update", 1), ("push", 1),
        ("accumulate", 2), ("show", 1), ("accumulate", 2), ("update", 2), ("push", 2),
        ("accumulate", 3), ("accumulate", 3), ("show", 2), ("update", 3), ("push", 3), ("show", 3),  # 2 is validated
    ]  # fmt: skip


def test_a_validation_goes_ahead_of_what_is_sampled_for_steps_after_the_next(tmp_path: Path) -> None:
    run = Played(tmp_path, max_staleness=1, sets_at=(1,))
    run.run(RunState())
    order = [call for call in run.calls if call[0] in ("sample", "request", "validate", "push")]
    assert order == [
        ("sample", 1), ("sample", 2), ("push", 1), ("request", 1), ("sample", 3), ("push", 2), ("request", 2),
        ("validate", 2), ("push", 3), ("request", 3), ("validate", 3),
    ]  # fmt: skip


def test_what_keeps_or_ends_a_run_sees_the_weights_that_were_measured(tmp_path: Path) -> None:
    """A run that does not get better ends with its last validated step, though the next one is sampled."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val/accuracy": 0.9}\n')
    run = Played(tmp_path)
    run.run(RunState(), {"metric": "val/accuracy", "patience": 1})
    assert [row["step"] for row in run.rows()] == [0, 1, 2]
    assert ("collect", 3) in run.calls and ("update", 3) not in run.calls and run.version == 2


@pytest.mark.parametrize("call", ["collect", "update", "push", "validate"])
def test_a_step_that_fails_is_not_logged(call: str, tmp_path: Path) -> None:
    run = Played(tmp_path, fails=(call, 2))
    with pytest.raises(RunFailed, match=f"{call} failed"):
        run.run(RunState())
    assert [row["step"] for row in run.rows()] == [1]
    assert run.calls[-1] == (call, 2)
    assert ("update", 3) not in run.calls


def test_a_run_that_goes_on_logs_first_what_was_trained_and_not_logged(tmp_path: Path) -> None:
    run = Played(tmp_path, step=2, version=2)
    run.run(RunState(step=2, row={"actor/loss": 7.0}))
    assert run.calls[:5] == [("sample", 3), ("request", 2), ("collect", 3), ("validate", 2), ("show", 2)]
    first, last = run.rows()
    assert (first["step"], first["actor/loss"], first["val/accuracy"]) == (2, 7.0, pytest.approx(0.2))
    assert last["step"] == 3


@pytest.mark.parametrize(
    ("max_staleness", "in_flight", "expected"),
    [(0, False, ["push", "request"]), (1, False, ["drain", "request"]), (1, True, ["push", "request"])],
)
def test_engines_are_drained_before_weights_where_these_do_not_come_in_flight(
    max_staleness: int, in_flight: bool, expected: list[str]
) -> None:
    did: list[str] = []

    def push_drained(request: Callable[[], None]) -> list[tuple[float, float]]:
        did.append("drain")
        request()
        return [(1.0, 3.0)]

    config = load({"schedule": {"max_staleness": max_staleness, "in_flight": in_flight}})
    sync = SimpleNamespace(push=lambda: did.append("push"), push_drained=push_drained)
    parts: Any = SimpleNamespace(sync=sync, answers=None)
    at = StepTimes(0.0)
    _push(config, parts, at, lambda: did.append("request"))
    assert did == expected and at.done > 0
    assert at.timings(None).get("timing_s/drain") == (2.0 if "drain" in did else None)
