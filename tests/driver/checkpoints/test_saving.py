"""When checkpoints are written by time, what they add up, and that one which is deleted is none. Without ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gkd.config import load
from gkd.driver.checkpoints import checkpoint, saving
from gkd.driver.checkpoints.checkpoint import RunState, complete, read
from gkd.driver.checkpoints.saving import Checkpoints, require_place
from gkd.durable import DirectoryIdentity
from gkd.errors import RunFailed
from tests.error_text import contains_in_order


class Actor:
    """Holds the weights of a step, which are none."""

    model_path, dtype, step = "", "float32", 0

    def stage(self) -> Any:
        return SimpleNamespace(step=self.step, rows=[])

    def write_staged(self, directory: str) -> Any:
        return directory

    def read_applied(self) -> Any:
        return SimpleNamespace(step=self.step)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in which ranks have written at once."""
    now = [1000.0]
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(saving, "gather", lambda calls, limit: [[]])
    monkeypatch.setattr(saving, "is_done", lambda calls: True)
    monkeypatch.setattr(saving, "wait", lambda calls, limit: None)
    return now


def test_those_by_time_are_so_many_minutes_apart(tmp_path: Path, now: list[float]) -> None:
    config = load({"trainer": {"total_steps": 200, "save_minutes": 10, "keep_checkpoints": 9}})
    writer, actor = Checkpoints(config, DirectoryIdentity.of(tmp_path), now[0], {}), Actor()
    for actor.step in range(1, 9):
        now[0] += 4 * 60
        writer.save_if_due(actor, RunState(actor.step))  # type: ignore[arg-type]
        writer.wait()
    assert [path.name for path in complete(tmp_path / "checkpoints")] == ["step_3", "step_6"]


def test_the_seconds_of_all_parts_of_a_run_add_up(tmp_path: Path, now: list[float]) -> None:
    config = load({"trainer": {"total_steps": 200, "save_every": 1}})
    writer, actor = Checkpoints(config, DirectoryIdentity.of(tmp_path), now[0], {}, first=6), Actor()
    actor.step = 7
    now[0] += 30.0
    writer.save_if_due(actor, RunState(7, wall_s=500.0))  # type: ignore[arg-type]
    writer.wait()
    assert read(tmp_path / "checkpoints" / "step_7").state.wall_s == 530.0


def test_one_whose_deletion_is_cut_short_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step_3"
    path.mkdir()
    (path / "state.json").touch()
    (path / "weights").touch()

    def cut_short(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", cut_short)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.remove(path)
    assert complete(tmp_path) == [] and checkpoint.list_incomplete(tmp_path) == [path]


@pytest.mark.parametrize("replaced", [False, True])
def test_nothing_is_written_where_the_run_is_not_any_more(
    tmp_path: Path, now: list[float], caplog: pytest.LogCaptureFixture, replaced: bool
) -> None:
    """Its directory was moved, and maybe another run is there."""
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    config = load({"trainer": {"total_steps": 200, "save_every": 1, "keep_checkpoints": 1}})
    writer, actor = Checkpoints(config, DirectoryIdentity.of(run), now[0], {}), Actor()

    def save(step: int) -> None:
        actor.step = step
        writer.save_if_due(actor, RunState(step))  # type: ignore[arg-type]
        writer.wait()

    save(1)
    run.rename(moved)
    if replaced:
        (run / "checkpoints" / "step_1").mkdir(parents=True)
    save(2)
    assert complete(run / "checkpoints") == []
    assert run.exists() == replaced and (not replaced or (run / "checkpoints" / "step_1").exists())
    assert contains_in_order(caplog.text, "step 2", "trainer.output_dir: ", " moved", "goes on")
    if replaced:
        shutil.rmtree(run)
    moved.rename(run)  # nothing is lost where it comes back
    save(3)
    assert [path.name for path in complete(run / "checkpoints")] == ["step_3"]


def test_a_directory_that_was_replaced_while_models_were_loaded_is_not_the_runs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    claimed = DirectoryIdentity.of(run)
    require_place(claimed)
    run.rename(tmp_path / "moved")
    run.mkdir()
    with pytest.raises(RunFailed, match=r"trainer\.output_dir: .* moved"):
        require_place(claimed)
    writer = Checkpoints(load({}), claimed, 0.0, {})
    assert writer.settle() == tmp_path / "run_2"


@pytest.mark.parametrize("replaced", [False, True])
def test_what_was_trained_goes_beside_where_the_run_is_not_any_more(
    tmp_path: Path, now: list[float], replaced: bool
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "run_2").mkdir()
    writer, actor = Checkpoints(load({"trainer": {"total_steps": 200}}), DirectoryIdentity.of(run), now[0], {}), Actor()
    assert writer.settle() == run
    run.rename(tmp_path / "moved")
    if replaced:
        (run / "checkpoints" / "step_1").mkdir(parents=True)
    assert writer.settle() == writer.settle() == tmp_path / "run_3"
    writer.save_if_due(actor, RunState(5))  # type: ignore[arg-type]
    actor.step = 5
    writer.rescue(actor)  # type: ignore[arg-type]
    assert [path.name for path in complete(tmp_path / "run_3" / "checkpoints")] == ["step_5"]
    assert run.exists() == replaced and (not replaced or (run / "checkpoints" / "step_1").exists())


def test_a_checkpoint_whose_lines_are_not_written_is_none(tmp_path: Path, now: list[float]) -> None:
    config = load({"trainer": {"total_steps": 200, "save_every": 1}})

    class Behind:
        def require_written(self) -> None:
            raise OSError(28, "No space left on device", "metrics.jsonl")

    logs: list[Any] = [Behind()]
    writer, actor = Checkpoints(config, DirectoryIdentity.of(tmp_path), now[0], {}, logs=logs), Actor()
    for actor.step in (1, 2):
        writer.save_if_due(actor, RunState(actor.step))  # type: ignore[arg-type]
        writer.wait()
        logs.clear()
    assert [path.name for path in complete(tmp_path / "checkpoints")] == ["step_2"]
