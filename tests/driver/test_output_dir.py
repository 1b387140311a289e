"""The directory of a run, which one run holds."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from gkd.driver.output_dir import LOOK_S, claim
from gkd.durable import CLAIM, hand_on, hold
from gkd.errors import ConfigError


def test_a_monitor_that_looks_at_a_directory_keeps_no_run_from_it(tmp_path: Path) -> None:
    """It finds out whether a run holds the directory by holding it together with other monitors, for a moment."""
    monitor = os.open(tmp_path, os.O_RDONLY)
    assert hold(monitor, shared=True)
    leaves = threading.Timer(1.5 * LOOK_S, os.close, (monitor,))
    leaves.start()
    run = claim(tmp_path)
    leaves.join()
    with pytest.raises(ConfigError, match=r"^trainer\.output_dir="):
        claim(tmp_path)
    os.close(run)


def test_what_a_killed_run_had_begun_to_write_is_deleted_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    drafts = [tmp_path / f"{name}.{1 << 22}" for name in ("checkpoints/.latest", ".timeline.json", ".report.html")]
    for draft in drafts:
        draft.touch()
    os.close(claim(tmp_path))
    assert not any(draft.exists() for draft in drafts)


def test_a_program_that_goes_on_in_place_of_another_holds_what_that_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CLAIM, "")  # so that it is as it was after the test
    other = tmp_path / "other"
    other.mkdir()
    for path in (tmp_path, other):  # the second one is claimed after another was handed on
        descriptor = claim(tmp_path)
        hand_on(descriptor)
        assert os.get_inheritable(descriptor)
        held = claim(path)
        assert (held == descriptor) == (path == tmp_path)
        assert CLAIM not in os.environ and not os.get_inheritable(held)
        for each in {held, descriptor}:
            os.close(each)
    monkeypatch.setenv(CLAIM, "no number")
    os.close(claim(tmp_path))
    monkeypatch.setenv(CLAIM, str(descriptor))  # closed by now
    os.close(claim(tmp_path))
