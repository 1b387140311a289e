"""The best student of a run: which validations write it, and what a run that goes on compares with."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gkd import durable
from gkd.config import load
from gkd.config.validating import require_figures
from gkd.driver.validation.best import BestModel
from gkd.durable import DirectoryIdentity
from gkd.errors import ConfigError, RunFailed, StudentNotWritten
from tests.error_text import contains_in_order


class Actor:
    """Writes how often it was asked to."""

    n = 0

    def save(self, directory: str, attend: Any = None) -> None:
        self.n += 1
        Path(directory).mkdir()
        Path(directory, "model.txt").write_text(str(self.n))


def best_by(metric: str, run: Path) -> BestModel:
    return BestModel(metric, DirectoryIdentity.of(run))


def looked(best: BestModel, actor: Any, values: list[float | None], first: int = 1) -> list[int]:
    kept = []
    for step, value in enumerate(values, start=first):
        before = actor.n
        best.update(step, {} if value is None else {best.metric: value}, actor)
        kept += [step] if actor.n > before else []
    return kept


def test_the_student_is_written_when_it_is_better_than_ever(tmp_path: Path) -> None:
    actor = Actor()
    assert looked(best_by("val/hard/accuracy", tmp_path), actor, [0.2, 0.1, None, 0.2, 0.5, 0.4]) == [1, 5]
    assert (tmp_path / "best" / "model.txt").read_text() == "2"
    assert json.loads((tmp_path / "best.json").read_text()) == {"metric": "val/hard/accuracy", "value": 0.5, "step": 5}
    assert looked(best_by("val/hard/accuracy", tmp_path), actor, [0.45, 0.6], first=7) == [8]  # the run goes on
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "best.json"]
    assert looked(best_by("val/accuracy", tmp_path), actor, [0.1, 0.05], first=9) == [9]  # by another figure


def test_a_link_to_another_place_stays_and_the_student_is_written_there(tmp_path: Path) -> None:
    place, run = tmp_path / "large" / "students", tmp_path / "run"
    place.mkdir(parents=True)
    run.mkdir()
    (run / "best").symlink_to(place)
    assert looked(best_by("val/accuracy", run), Actor(), [0.1, 0.2]) == [1, 2]
    assert (run / "best").is_symlink() and (place / "model.txt").read_text() == "2"
    assert [path.name for path in place.parent.iterdir()] == ["students"]


@pytest.mark.parametrize("fails", ["actor", "disk"])
def test_a_student_that_cannot_be_written_is_a_warning_and_the_last_one_ends_the_run(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        if fails == "actor":
            raise StudentNotWritten("no space left on device: /there")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/there")

    actor, best = Actor(), best_by("val/accuracy", tmp_path)
    best.update(1, {"val/accuracy": 0.1}, actor)
    with monkeypatch.context() as full:
        full.setattr(*((actor, "save") if fails == "actor" else (durable, "replace")), fail)
        best.update(2, {"val/accuracy": 0.2}, actor)
    (text,) = caplog.messages
    assert contains_in_order(text, "step 2", "val/accuracy", "no space", "/there")
    with pytest.raises(RunFailed, match=r"\bstep 2\b"):
        best.finish()
    if fails == "actor":  # all is as it was
        assert json.loads((tmp_path / "best.json").read_text())["step"] == 1
    # Better than what was written last; or all the same, where nobody knows what that is.
    best.update(3, {"val/accuracy": 0.15 if fails == "actor" else 0.05}, actor)
    best.finish()
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 3


def until_then(left: Iterator[int], call: Callable[..., Any]) -> Callable[..., Any]:
    def count_down(*args: Any, **kwargs: Any) -> Any:
        if next(left) == 0:
            raise KeyboardInterrupt
        return call(*args, **kwargs)

    return count_down


def test_a_run_killed_at_any_moment_leaves_no_record_of_another_student(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a record the next validation writes both."""
    for moment in itertools.count():
        run, actor, left = tmp_path / str(moment), Actor(), itertools.count(moment, -1)
        run.mkdir()
        best = best_by("val/accuracy", run)
        best.update(1, {"val/accuracy": 0.1}, actor)

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            for name in ("replace", "unlink", "rmdir", "fsync"):
                patch.setattr(os, name, until_then(left, getattr(os, name)))
            best.update(2, {"val/accuracy": 0.5}, actor)
        if (run / "best.json").exists():
            step = json.loads((run / "best.json").read_text())["step"]
            assert (run / "best" / "model.txt").read_text() == str(step)
        best_by("val/accuracy", run).update(3, {"val/accuracy": 0.6}, actor)
        assert json.loads((run / "best.json").read_text())["step"] == 3
        if next(left) > 0:
            assert moment > 5
            return


def test_a_divergence_is_better_the_smaller_it_is(tmp_path: Path) -> None:
    assert looked(best_by("val/reverse_kl", tmp_path), Actor(), [2.0, 2.5, 1.0]) == [1, 3]


def test_a_reward_is_better_the_larger_it_is_whatever_its_name(tmp_path: Path) -> None:
    assert looked(best_by("val/reward/length", tmp_path), Actor(), [2.0, 2.5, 1.0]) == [1, 2]


@pytest.mark.parametrize("name", ["val/hard/length", "val/loss", "val/reward/length/failed"])
def test_of_these_the_smaller_is_better(name: str, tmp_path: Path) -> None:
    assert looked(best_by(name, tmp_path), Actor(), [2.0, 2.5, 1.0]) == [1, 3]


def test_a_figure_that_is_not_measured_is_named() -> None:
    with pytest.raises(ConfigError, match=r"trainer.keep_best=val/acuracy: validation measures val/accuracy, val/x"):
        require_figures(load({"trainer": {"keep_best": "val/acuracy"}}).trainer, {"val/accuracy": 0.1, "val/x": 1.0})


def test_a_reward_that_failed_on_every_answer_is_named() -> None:
    measured = {"val/accuracy": 0.1, "val/reward/x/failed": 1.0, "val/reward/y/failed": 0.5}
    with pytest.raises(ConfigError, match=r"trainer.keep_best=val/reward/mean: .*; .*: val/reward/x/failed$"):
        require_figures(load({"trainer": {"keep_best": "val/reward/mean"}}).trainer, measured)
