"""Runs Python programs in processes that may do little: bounded time, memory and output, and no network.

Limits are the kernel's (setrlimit). Without a network a program has namespaces of its own (unshare); some machines do
not allow them, see :func:`network_can_be_cut`. What it starts ends with it. It runs in an empty directory,
without this process' environment. It can read what its user can read: this keeps accidents away, not an attacker.
How many processes it starts is not limited: RLIMIT_NPROC does not hold for root, as which containers run, and counts
all of a user's processes before Linux 5.14. They end with its time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

from gkd.rewards import sandboxed

GRACE_S = 1.0
"""Time beyond a program's own within which it has to have been ended."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """End of a program: its exit ``code``, None where its time was over, and what it wrote to standard output."""

    code: int | None
    output: str


class Sandbox:
    """Runs programs one after the other, each in a process and a directory of its own; a context.

    Each may take ``memory_mb``. ``offline``: without a network.
    """

    def __init__(self, memory_mb: int, offline: bool) -> None:
        self._limits = [str(memory_mb), str(int(offline))]
        self._directory = Path(tempfile.mkdtemp(prefix="gkd-code-"))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        shutil.rmtree(self._directory, ignore_errors=True)

    def run(self, program: str, stdin: str, timeout_s: float, name: str = "__main__") -> ProgramResult:
        """Run the Python ``program`` with ``stdin`` for at most ``timeout_s``; ``name`` is its ``__name__``.

        Raises OSError where the process, or one without a network, cannot be had.
        """
        directory = Path(tempfile.mkdtemp(dir=self._directory))
        try:
            (directory / "program.py").write_text(program, encoding="utf-8", errors="replace")
            (directory / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
            (directory / "output").touch()
            code = self._run(directory, timeout_s, name)
            return ProgramResult(code, (directory / "output").read_bytes().decode("utf-8", "replace"))
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _run(self, directory: Path, timeout_s: float, name: str) -> int | None:
        """Return the exit code of the program in ``directory``."""
        if self._process is None:
            self._start()
        assert self._process is not None
        self._control.settimeout(timeout_s + GRACE_S)
        try:
            self._control.sendall(f"{directory} {name} {timeout_s}".encode())
            answer = self._control.recv(16)
        except TimeoutError:
            self._end()
            return None
        except OSError:  # it has ended
            answer = b""
        if answer:
            return None if int(answer) == sandboxed.NO_END else int(answer)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)  # a program ended it, or it could not start
        code = self._process.returncode
        self._end()
        if code == sandboxed.NOT_ALLOWED:
            raise PermissionError("this machine does not let a process be without a network (unshare)")
        return code or 1

    def _start(self) -> None:
        self._control, child_end = socket.socketpair()
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-B", sandboxed.__file__, str(child_end.fileno()), *self._limits],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[child_end.fileno()],
                cwd=self._directory,
                env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def _end(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            self._control.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(program: str, stdin: str, timeout_s: float, memory_mb: int, offline: bool) -> ProgramResult:
    """Run one program, in a :class:`Sandbox` of its own."""
    with Sandbox(memory_mb, offline) as sandbox:
        return sandbox.run(program, stdin, timeout_s)


@cache
def network_can_be_cut() -> bool:
    """Return whether this machine lets a program run without a network."""
    try:
        return run("print('ran')", "", 60.0, 1024, offline=True).output == "ran\n"
    except PermissionError:
        return False
