"""Runs a Python program in a process that may do little: bounded time, memory and output, and no network.

Limits are the kernel's (setrlimit). Without a network the program has namespaces of its own (unshare), in which what it
starts ends with it; some machines do not allow them, see :func:`network_can_be_cut`. It runs in an empty directory,
without this process' environment. It can read what its user can read: this keeps accidents away, not an attacker.
How many processes it starts is not limited: RLIMIT_NPROC does not hold for root, as which containers run, and counts
all of a user's processes before Linux 5.14. Without a network they end with its time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

OUTPUT_BYTES = 1 << 20
NOT_ALLOWED = 126

# Runs before the program, in its process: a function between fork and exec is not safe where there are threads.
_PRELUDE = f"""
import ctypes, os, resource, signal, sys
seconds, megabytes, offline = map(int, sys.argv[1:4])
libc = ctypes.CDLL(None)
with_parent = lambda: libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
with_parent()
if offline:
    if libc.unshare(0x10000000 | 0x40000000 | 0x20000000):  # CLONE_NEWUSER, NEWNET, NEWPID
        os._exit({NOT_ALLOWED})
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(1 if code == {NOT_ALLOWED} else code if code >= 0 else 128 - code)
    with_parent()
for kind, limit in (
    (resource.RLIMIT_AS, megabytes << 20), (resource.RLIMIT_CPU, seconds),
    (resource.RLIMIT_FSIZE, {OUTPUT_BYTES}), (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(kind, (limit, limit))
os.execv(sys.executable, [sys.executable, "-I", "-B", "program.py"])
"""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """End of a program: its exit ``code``, None where its time was over, and what it wrote to standard output."""

    code: int | None
    output: str


def run(program: str, stdin: str, timeout_s: float, memory_mb: int, offline: bool) -> ProgramResult:
    """Run the Python ``program`` with ``stdin`` for at most ``timeout_s``.

    ``offline``: without a network. Raises OSError where that, or the process, cannot be had.
    """
    directory = Path(tempfile.mkdtemp(prefix="gkd-code-"))
    try:
        (directory / "program.py").write_text(program, encoding="utf-8", errors="replace")
        (directory / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        return _run(directory, timeout_s, memory_mb, offline)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _run(directory: Path, timeout_s: float, memory_mb: int, offline: bool) -> ProgramResult:
    limits = [str(int(timeout_s) + 1), str(memory_mb), str(int(offline))]
    output = directory / "output"
    with (directory / "stdin").open("rb") as stdin, output.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", _PRELUDE, *limits],
            stdin=stdin,
            stdout=written,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env={"PATH": "/usr/bin:/bin", "HOME": str(directory), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == NOT_ALLOWED and offline:
        raise PermissionError("this machine does not let a process be without a network (unshare)")
    return ProgramResult(code, output.read_bytes().decode("utf-8", "replace"))


@cache
def network_can_be_cut() -> bool:
    """Return whether this machine lets a program run without a network."""
    try:
        return run("print('ran')", "", 60.0, 1024, offline=True).output == "ran\n"
    except PermissionError:
        return False
