"""A tracker with a process of its own."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from gkd.errors import ConfigError
from tests.observability.test_trackers import ROWS, config, write


def test_wandb_keeps_the_run_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    write(config("wandb"), tmp_path, ROWS)
    (run,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    data = run.read_bytes()
    assert b"val/accuracy" in data
    assert b"actor/loss" in data
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=60)
    assert [child.cmdline() for child in alive] == []


def test_a_tracker_that_cannot_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 3)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"^trainer.trackers: wandb did not start: .*WANDB_MODE=offline"):
        write(config("wandb"), tmp_path, ROWS)
