"""Signals that end a program, and those that do not."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import time
from gkd.cluster.session.shutdown import exit_on_signals
from gkd.errors import catch_errors

def run():
    exit_on_signals()
    print("up", flush=True)
    time.sleep(60)

raise SystemExit(catch_errors(run))
"""


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGTERM, 143, "stopped by SIGTERM\n"),
        (signal.SIGHUP, 129, "stopped by SIGHUP\n"),
        (signal.SIGINT, 130, "stopped by Ctrl-C\n"),
    ],
)
def test_each_has_a_line_and_a_code(number: signal.Signals, code: int, line: str) -> None:
    run = _start([sys.executable, "-c", PROGRAM])
    run.send_signal(number)
    assert (run.wait(30), run.stderr.read() if run.stderr else "") == (code, line)


def test_a_closed_terminal_does_not_end_what_was_started_with_nohup() -> None:
    run = _start(["nohup", sys.executable, "-c", PROGRAM])
    run.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(0.5)
    run.terminate()
    assert run.wait(30) == 143


def _start(command: list[str]) -> subprocess.Popen[str]:
    run = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "up\n"
    return run
