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


CLOSES = """
import signal, time
from gkd.cluster.session.shutdown import exit_on_signals, ignore_signals, received_signal
from gkd.errors import catch_errors

def run():
    exit_on_signals()
    with ignore_signals():
        assert received_signal() is None
        print("up", flush=True)
        while received_signal() is None:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)
    raise received_signal()

raise SystemExit(catch_errors(run))
"""


def test_a_signal_that_comes_while_something_is_closed_is_known_after_it() -> None:
    """A run that has failed would begin again else."""
    run = _start([sys.executable, "-c", CLOSES])
    run.send_signal(signal.SIGTERM)  # and Ctrl-C comes after it
    assert (run.wait(30), run.stderr.read() if run.stderr else "") == (143, "stopped by SIGTERM\n")


FORKS = """
import os, signal, sys
from ray._private import services
from gkd.cluster.session.connect import start_servers_in_own_groups
from gkd.cluster.session.shutdown import exit_on_signals
from gkd.errors import catch_errors

os.register_at_fork(before=lambda: os.kill(os.getpid(), int(sys.argv[1])))

def run():
    exit_on_signals()
    command = [sys.executable, "-c", "import signal; print(*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))"]
    with start_servers_in_own_groups():
        services.ConsolePopen(command, preexec_fn=os.getpid)
    return 0

raise SystemExit(catch_errors(run))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_one_that_comes_while_rays_servers_are_started_is_acted_on(number: signal.Signals) -> None:
    """Python forks itself for those, and discards what is raised in what libraries have registered for that."""
    done = subprocess.run([sys.executable, "-c", FORKS, str(int(number))], capture_output=True, text=True, check=False)
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert (done.returncode, done.stderr) == (128 + number, f"stopped by {name}\n")
    assert done.stdout == "\n"  # a server has none of them blocked


def _start(command: list[str]) -> subprocess.Popen[str]:
    run = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "up\n"
    return run
