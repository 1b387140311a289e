"""How a sweep ends before its time, and what its run does then."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gkd.config.compose import compose
from gkd.driver.output_dir import claim
from gkd.errors import ConfigError

SWEEP = """
import sys
from gkd.cli.train import main
sys.executable, output = sys.argv[1:]
sys.exit(main(["--multirun", "+recipe=grpo", "actor.lr=0.1,0.2", f"trainer.output_dir={output}"]))
"""
SAVES = """#!/bin/sh
trap 'touch saves; until [ -e saved ]; do sleep 0.05; done; exit 143' TERM
touch began
until [ -e saved ]; do sleep 0.05; done
"""
"""In place of a run: on SIGTERM it saves a checkpoint, which takes until a file is there."""


def start(directory: Path) -> subprocess.Popen[bytes]:
    """A sweep whose run has begun."""
    run = directory / "run.sh"
    run.write_text(SAVES)
    run.chmod(0o755)
    command = [sys.executable, "-c", SWEEP, str(run), str(directory / "a sweep")]
    with (directory / "errors").open("wb") as errors:
        process = subprocess.Popen(command, cwd=directory, stderr=errors)
    wait_for(directory / "began")
    return process


def wait_for(file: Path) -> None:
    """Until a file is there."""
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, file
        time.sleep(0.05)


def test_a_sweep_that_is_killed_ends_its_run_and_is_under_way_until_then(tmp_path: Path) -> None:
    process = start(tmp_path)
    try:
        process.kill()
        process.wait(timeout=60)
        wait_for(tmp_path / "saves")
        with pytest.raises(ConfigError, match=r"^trainer\.output_dir="):
            claim(tmp_path / "a sweep")
    finally:
        (tmp_path / "saved").touch()
    deadline = time.monotonic() + 60
    while True:
        try:
            os.close(claim(tmp_path / "a sweep"))
            break
        except ConfigError:
            assert time.monotonic() < deadline


def test_a_sweep_that_is_stopped_states_how_it_goes_on(tmp_path: Path) -> None:
    process = start(tmp_path)
    process.send_signal(signal.SIGINT)
    wait_for(tmp_path / "saves")  # its run would end by itself else
    (tmp_path / "saved").touch()
    assert process.wait(timeout=60) == 130
    line = (tmp_path / "errors").read_text().splitlines()[-1]
    assert line.startswith("stopped by")
    settings = [text for text in shlex.split(line) if text.startswith("trainer.")]
    trainer = compose(["+recipe=grpo", *settings]).trainer
    assert (trainer.output_dir, trainer.resume) == (str(tmp_path / "a sweep"), True)
