"""A checkpoint that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from gkd.cli.export import main


def test_a_run_that_left_no_checkpoint_has_its_student_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finished run has none unless ``trainer.save_every`` was set, and what is asked for is there already."""
    arguments = [str(tmp_path / "run"), str(tmp_path / "out")]
    assert main(arguments) == 2
    (unfinished,) = capsys.readouterr().err.splitlines()
    (tmp_path / "run" / "model").mkdir(parents=True)
    assert main(arguments) == 2
    (finished,) = capsys.readouterr().err.splitlines()
    assert [str(tmp_path / "run" / "model") in line for line in (unfinished, finished)] == [False, True]
