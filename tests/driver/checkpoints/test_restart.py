"""When a run begins again by itself, and with which command."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gkd.cli.train import run as run_train
from gkd.cluster.session.connect import run_address
from gkd.cluster.workers.failure import WorkerDied, WorkerHung
from gkd.config import Config, load
from gkd.config.compose import compose
from gkd.config.loading import dump_run
from gkd.config.own_code import KEPT, find_kept
from gkd.driver.checkpoints.attempts import COUNT, FIRST_FAILURE, forget_failure_on_step, name_first_failure, restarts
from gkd.driver.checkpoints.restart import begin_again, may_begin_again, start_over
from gkd.driver.checkpoints.resume import find
from gkd.driver.output_dir import claim, make_output_dir
from gkd.driver.validation.best import BestModel
from gkd.durable import CLAIM, DirectoryIdentity
from gkd.errors import ConfigError, ControlLost, RunFailed, SignalExit
from tests.data.models import save_model

TWICE = load({"trainer": {"restarts": 2}})


@pytest.fixture(autouse=True)
def _first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COUNT, "0")
    for name in (FIRST_FAILURE, CLAIM, KEPT, "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")  # so that it is as it was after the test
        monkeypatch.delenv(name)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has done three steps."""
    (tmp_path / "config.yaml").write_text("trainer: {total_steps: 9}\n")
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(4)))
    (tmp_path / "samples.jsonl").write_text('{"step": 3}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("failure", "private", "again"),
    [
        (WorkerDied("actor"), False, True),
        (WorkerHung("engine"), True, True),
        (ControlLost("gone"), True, True),
        (ControlLost("gone"), False, False),  # the cluster's head: there is nothing to go on with
        (RunFailed("a loss that is no number"), True, False),
    ],
)
def test_only_what_was_lost_is_begun_again(failure: Any, private: bool, again: bool) -> None:
    assert may_begin_again(TWICE, failure, private) == again


@pytest.mark.parametrize("received", [[], [(15, 0.0)]])
def test_a_run_that_was_told_to_end_while_it_closed_does_not_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, received: list[tuple[int, float]]
) -> None:
    begun: list[str] = []

    @contextmanager
    def connect(_: Config) -> Iterator[None]:
        raise WorkerDied("actor rank 0 died")
        yield

    monkeypatch.setattr("gkd.cluster.session.connect.connect", connect)
    monkeypatch.setattr("gkd.cluster.session.shutdown._received", received)
    monkeypatch.setattr("gkd.cli.train._find_inputs", lambda *_: None)
    monkeypatch.setattr("gkd.driver.checkpoints.restart.begin_again", lambda *_: begun.append("again"))
    config = compose(["+recipe=grpo", f"trainer.output_dir={tmp_path / 'run'}", "cluster.address=local"])
    with pytest.raises(SignalExit if received else WorkerDied) as end:
        run_train(config, ["+recipe=grpo"])
    assert begun == ([] if received else ["again"])
    if received:
        assert isinstance(end.value, SignalExit) and end.value.exit_code == 143
        assert "checkpoint" in end.value.__notes__[0]


@pytest.mark.parametrize("steps", [None, 2, 3])
def test_a_stopped_run_says_whether_it_had_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int | None
) -> None:
    """As while a tracker takes its time to close."""

    def connect(_: Config) -> None:
        if steps is not None:
            save_model(tmp_path / "model")
            (tmp_path / "summary.json").write_text(f'{{"steps": {steps}}}')
        raise SignalExit(signal.SIGTERM)

    monkeypatch.setattr("gkd.cluster.session.connect.connect", connect)
    monkeypatch.setattr("gkd.cli.train._find_inputs", lambda *_: None)
    config = compose(
        ["+recipe=grpo", f"trainer.output_dir={tmp_path}", "trainer.total_steps=3", "cluster.address=local"]
    )
    with pytest.raises(SignalExit) as end:
        run_train(config)
    (note,) = end.value.__notes__
    assert (str(tmp_path / "model") in note) == ("is finished" in note) == (steps == 3)
    assert "no checkpoint" in note


def test_what_a_run_leaves_names_its_files_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven: list[Config] = []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "student").mkdir()
    (tmp_path / "a.jsonl").touch()
    session = SimpleNamespace(directory=None, joined_address=None)
    monkeypatch.setattr("gkd.cluster.session.connect.connect", lambda _: nullcontext(session))
    monkeypatch.setattr("gkd.cli.train._find_inputs", lambda *_: None)
    monkeypatch.setattr("gkd.driver.run.drive", lambda config, *_: driven.append(config))
    files = ["data.train_files=[a.jsonl]", "data.val_files=[a.jsonl]", "data.answer_key=answer"]
    config = compose(["+recipe=grpo", "model.path=student", *files, "trainer.output_dir=run", "cluster.address=local"])
    run_train(config)
    (whole,) = driven
    assert whole.model.path == f"{tmp_path}/student" and whole.data.train_files == [f"{tmp_path}/a.jsonl"]
    assert whole.trainer.output_dir == f"{tmp_path}/run"


def test_not_more_often_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    died = WorkerDied("actor")
    monkeypatch.setenv(COUNT, "1")
    assert may_begin_again(TWICE, died, True)
    monkeypatch.setenv(COUNT, "2")
    assert not may_begin_again(TWICE, died, True)
    assert not may_begin_again(load({"trainer": {"restarts": 0}}), died, True)


def first_failures() -> list[str | None]:
    """What each kind of end names beside itself; with it, none of them is a mistake of the user's."""
    notes: list[str | None] = []
    for error in (ConfigError("no GPU"), WorkerDied("rollout"), ControlLost("gone")):
        with pytest.raises((ConfigError, RunFailed, ControlLost)) as end, name_first_failure():
            raise error
        assert str(end.value) == str(error)
        notes.append((getattr(end.value, "__notes__", None) or [None])[0])
        assert isinstance(end.value, ConfigError) == (notes[0] is None and isinstance(error, ConfigError))
    return notes


def test_the_first_failure_is_known_until_a_step_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execv", lambda *_: None)
    assert first_failures() == [None] * 3
    known = ["no step was trained since the first failure: actor rank 0 died"] * 3
    for failure in ("actor\nrank 0 died", "rollout rank 0 died"):
        begin_again(TWICE, [], tmp_path, 0, None, WorkerDied(failure))
        assert first_failures() == known
    steps: list[int] = []
    on_step = forget_failure_on_step(lambda step, _: steps.append(step))
    on_step(0, {})  # the validation before the first step
    assert first_failures() == known
    on_step(4, {})
    assert first_failures() == [None] * 3 and steps == [0, 4]
    forget_failure_on_step(None)(5, {})


@given(st.text(st.sampled_from("ab \\'\",=#${}[]%\u00e4"), min_size=1).map(lambda name: f"/x{name}"))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_the_command_goes_on_in_the_same_directory_and_cluster(monkeypatch: pytest.MonkeyPatch, directory: str) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, command: commands.append(command))
    monkeypatch.setenv(COUNT, "0")
    arguments = ["+recipe=grpo", "trainer.output_dir=elsewhere"]
    for address in (None, "[2001:db8::1]:6379"):
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        begin_again(TWICE, arguments, Path(directory), 0, address, WorkerDied("actor"))
        assert run_address(compose(commands[-1][3:]).cluster) == address  # which config.yaml does not keep
    command = commands[0]
    assert command[1:3] == ["-m", "gkd.main"]
    config: Config = compose(command[3:])
    assert (config.trainer.output_dir, config.trainer.resume, config.recipe) == (str(Path(directory)), True, "grpo")
    assert restarts() == 2


def test_a_file_of_settings_is_that_of_the_run_which_nobody_edits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that began with other values than the file has by then goes on with its own."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, command: commands.append(command))
    monkeypatch.setenv(COUNT, "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    file, output = tmp_path / "mine.yaml", tmp_path / "run"
    output.mkdir()
    file.write_text("recipe: grpo\ntrainer: {gpus: [7], seed: 3}\n")
    arguments = [str(file), "placement=8gpu", "actor.lr=1e-5"]
    began = compose(arguments)
    begin_again(TWICE, arguments, output, 0, None, WorkerDied("actor"))  # before it has written any
    (output / "config.yaml").write_text(dump_run(began, began))
    file.write_text("recipe: grpo\ntrainer: {seed: 4}\n")
    begin_again(TWICE, arguments, output, 0, None, WorkerDied("actor"))
    assert commands[0][3:6] == arguments
    assert os.environ[KEPT] == str(find_kept(output / "sources"))
    goes_on = compose(commands[1][3:])
    trainer = goes_on.trainer.model_copy(update={"output_dir": began.trainer.output_dir, "resume": False})
    assert goes_on.model_copy(update={"trainer": trainer}) == began and goes_on.trainer.resume is True


def test_without_a_checkpoint_it_starts_over(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not start_over(TWICE, run)  # the user's own trainer.resume=true, which is refused elsewhere
    assert (run / "metrics.jsonl").exists()
    monkeypatch.setenv(COUNT, "1")
    saved = run / "checkpoints" / "step_3"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text("{}")
    assert not start_over(TWICE, run)  # there is one, if a damaged one
    assert (run / "metrics.jsonl").exists()
    (saved / "state.json").unlink()
    assert start_over(TWICE, run)
    assert not (run / "metrics.jsonl").exists() and not (run / "samples.jsonl").exists()


def test_one_that_may_begin_or_go_on_begins_where_there_is_nothing_to_go_on_with(run: Path) -> None:
    auto = load({"trainer": {"resume": "auto", "output_dir": str(run)}})
    (run / "summary.json").write_text('{"steps": 3}')
    assert not start_over(auto, run)  # it has ended: its figures are no attempt's
    (run / "summary.json").unlink()
    (run / "best.json").write_text('{"metric": "val/accuracy", "value": 0.9, "step": 3}')
    saved = run / "checkpoints" / "step_3"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text("{}")
    assert not start_over(auto, run)
    assert (run / "metrics.jsonl").exists()
    (saved / "state.json").unlink()
    assert start_over(auto, run)
    assert not (run / "metrics.jsonl").exists()
    best = BestModel("val/accuracy", DirectoryIdentity.of(run))
    assert best.value is None  # which a student of other settings may never reach


@pytest.mark.parametrize("count", ["0", "1"])
def test_a_student_that_is_there_is_not_trained_again_without_its_summary(
    run: Path, monkeypatch: pytest.MonkeyPatch, count: str
) -> None:
    """As where the program was killed, or the disk full, between the two: a student is the last step's."""
    monkeypatch.setenv(COUNT, count)
    auto = load({"trainer": {"resume": "auto", "output_dir": str(run)}})
    (run / "model").mkdir()
    assert not start_over(auto, run)
    assert (run / "metrics.jsonl").exists()
    with pytest.raises(ConfigError, match=rf"summary\.json.*model\.path={re.escape(str(run))}/model$"):
        find(auto, run)


def test_the_directory_of_one_that_may_begin_need_not_be_there(tmp_path: Path) -> None:
    path = tmp_path / "new"
    with pytest.raises(ConfigError, match=rf"trainer\.resume=true: .*{path}.* trainer\.resume=auto "):
        make_output_dir(load({"trainer": {"resume": True, "output_dir": str(path)}}))
    with pytest.raises(ConfigError, match=r"trainer\.resume .*trainer\.output_dir"):
        make_output_dir(load({"trainer": {"resume": "auto"}}))
    assert make_output_dir(load({"trainer": {"resume": "auto", "output_dir": str(path)}})) == path
    (path / "metrics.jsonl").touch()
    assert make_output_dir(load({"trainer": {"resume": "auto", "output_dir": str(path)}})) == path


@pytest.mark.parametrize(("mode", "resume"), [(0, False), (0, True), (0o300, False)])
def test_a_directory_that_this_user_may_not_look_into_is_refused(mode: int, resume: bool) -> None:
    is_root = os.getuid() == 0  # who may look everywhere
    with tempfile.TemporaryDirectory() as base:
        path = Path(base) / "run"
        path.mkdir()
        path.chmod(mode)
        if is_root:
            for directory in (path, path.parent):
                os.chown(directory, 65534, 65534)
            os.setresuid(65534, 65534, 0)
        try:
            with pytest.raises(ConfigError, match=rf"trainer\.output_dir={path} "):
                claim(make_output_dir(load({"trainer": {"output_dir": str(path), "resume": resume}})))
        finally:
            if is_root:
                os.setresuid(0, 0, 0)
            path.chmod(0o700)


def test_a_directory_with_a_checkpoint_is_refused_with_how_to_go_on(tmp_path: Path) -> None:
    """As the command is typed again after Ctrl-C."""
    (tmp_path / "metrics.jsonl").touch()
    config = load({"trainer": {"output_dir": str(tmp_path)}})
    with pytest.raises(ConfigError, match=r"trainer\.output_dir") as caught:
        make_output_dir(config)
    assert "trainer.resume" not in str(caught.value)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step_1")
    with pytest.raises(ConfigError, match=r"trainer\.resume=true"):
        make_output_dir(config)
