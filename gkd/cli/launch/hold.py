"""Starts a Ray node with the options of ``ray start``, and holds it together until a signal ends it.

``ray start --block`` does that as well, but ends a whole head as soon as one of its servers does. Where that is Ray's
control service (the GCS) the runs on the head's GPUs would be killed before they can save anything. Here a node lives
for as long as its raylet, which ends by itself when it has been without the control service for too long.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from gkd.cluster.session.shutdown import exit_on_signals, ignore_signals
from gkd.errors import RunFailed, entry_point

PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>
POLL_EVERY_S = 0.5
START_S = 300.0
RAYLET_S = 6.0
"""Time that a raylet has to end the workers of its node, before the servers that it talks to are ended."""


@entry_point
def main(arguments: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    exit_on_signals()
    _adopt_orphans()
    try:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments]
        try:
            started = subprocess.run(command, check=False, timeout=START_S)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"ray start has not started a node within {START_S:g} s") from None
        if started.returncode:
            return started.returncode
        while _is_raylet_alive():
            time.sleep(POLL_EVERY_S)
            _reap()
        raise RunFailed("the node's raylet has ended")
    finally:
        with ignore_signals():
            _end_servers()


def _adopt_orphans() -> None:
    """Make this process the parent of what its children leave behind, so that Ray's servers are found and reaped."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise RunFailed(f"prctl: {os.strerror(ctypes.get_errno())}")


def _is_raylet_alive() -> bool:
    """Return whether the raylet, a child since ``ray start`` has ended, is there and no zombie."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.name() == "raylet" and child.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end_servers() -> None:
    """Terminate the raylet, and then the others; whoever stops the node kills what is left."""
    for is_raylet, wait_s in ((True, RAYLET_S), (False, 1.0)):
        servers = []
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                if (child.name() == "raylet") == is_raylet:
                    child.terminate()
                    servers.append(child)
        psutil.wait_procs(servers, timeout=wait_s)
