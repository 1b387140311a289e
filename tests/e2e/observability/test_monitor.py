"""``gkd monitor`` on a terminal, on one that can do little, and where there is none."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
from pathlib import Path

import pytest


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("trainer: {total_steps: 10}\n")
    rows = [{"step": 0, "val/accuracy": 0.25}, {"step": 1, "timing_s/step": 30.0, "timing_s/update": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def on_a_terminal(run: Path, **variables: str) -> str:
    """What the program writes to a terminal beside a run that then ends."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (60, 100))
    command = [sys.executable, "-m", "gkd.monitor", ".", "--every", "0.2"]
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")}
    with subprocess.Popen(
        command,
        cwd=run,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**plain, "TERM": "xterm-256color", **variables},
    ) as process:
        os.close(theirs)
        written = b""
        while select.select([ours], [], [], 60)[0]:
            try:
                written += os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            if b"val/accuracy" in written:
                (run / "summary.json").write_text("{}")
        os.close(ours)
        assert process.wait(60) == 0
    return written.decode()


def test_on_a_terminal_the_view_is_rewritten_without_colours_where_none_are_wanted(run: Path) -> None:
    (run / "events.jsonl").write_text(json.dumps({"time": 0, "kind": "warning", "text": "hot"}) + "\n")
    text = on_a_terminal(run, NO_COLOR="1")
    assert text.startswith("\x1b[?1049h") and "\x1b[?1049l" in text  # a screen of its own, and back
    assert not re.search(r"\x1b\[[0-9;]*(3|4|9|10)[0-7][;m]", text)
    after = text.partition("\x1b[?1049l")[2]
    assert "finished, 1 step\r\n" in after and "warning" in after


def test_a_terminal_that_rewrites_nothing_has_one_view_after_the_other(run: Path) -> None:
    text = on_a_terminal(run, TERM="dumb")
    assert "\x1b" not in text and text.index("step 1/10") < text.index("finished, 1 step")


def test_colours_forced_upon_a_pipe_make_no_terminal_of_it(run: Path) -> None:
    command = [sys.executable, "-m", "gkd.monitor", "."]
    variables = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables, check=True, cwd=run)
    assert done.stderr == ""  # once, and not until the run ends
    assert done.stdout.count("step 1/10") == 1 and "\x1b[?1049h" not in done.stdout
