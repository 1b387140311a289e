"""The process in which programs run: for each it makes a copy of itself, with limits, and ends whatever that leaves.

:mod:`gkd.rewards.sandbox` starts it as a file, with the standard library alone, and states what a program may do. A
copy costs a hundredth of a new interpreter, and a program may have hundreds of tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import runpy
import signal
import sys
import time

NOT_ALLOWED = 126
"""Exit code where this machine does not let a process be without a network."""
NO_END = -1000
"""In place of the exit code of a program that has not ended in its time."""
OUTPUT_BYTES = 1 << 20
NEW_NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000  # CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWPID
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CHILDREN = "/proc/thread-self/children"


def main() -> None:
    """Run a program for each message ``DIRECTORY NAME SECONDS``, and answer with its exit code or :data:`NO_END`."""
    control, megabytes, offline = map(int, sys.argv[1:4])
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if offline:
        if libc.unshare(NEW_NAMESPACES):
            os._exit(NOT_ALLOWED)
        if child := os.fork():  # the first process of the new namespaces, with which all others there end
            os.close(control)
            os.waitpid(child, 0)
            os._exit(1)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    elif os.path.exists(CHILDREN):  # noqa: PTH110
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a program leaves becomes a child of this process
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while message := os.read(control, 4096).decode():
        directory, name, seconds = message.rsplit(" ", 2)
        child = os.fork()
        if child == 0:
            os.close(control)
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            run_program(directory, name, megabytes, int(float(seconds)) + 1)
            return
        code = wait_for(child, float(seconds))
        end_all(child, bool(offline))
        os.write(control, b"%d" % code)


def run_program(directory: str, name: str, megabytes: int, seconds: int) -> None:
    """Become the program in ``directory``, as the module ``name``, whose end is that of this process."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    os.chdir(directory)
    os.environ.update(HOME=directory, TMPDIR=directory)
    for file, flags, descriptor in (("stdin", os.O_RDONLY, 0), ("output", os.O_WRONLY, 1)):
        os.dup2(os.open(file, flags), descriptor)
    for kind, limit in (
        (resource.RLIMIT_AS, megabytes << 20),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, OUTPUT_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    sys.argv = ["program.py"]
    runpy.run_path("program.py", run_name=name)


def wait_for(child: int, seconds: float) -> int:
    """Return the exit code of ``child``, which stays a zombie so that its number is its own, or :data:`NO_END`."""
    deadline = time.monotonic() + seconds
    while True:
        end = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is not None:
            return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        left = deadline - time.monotonic()
        if left <= 0:
            return NO_END
        signal.sigtimedwait([signal.SIGCHLD], left)


def end_all(child: int, offline: bool) -> None:
    """End ``child`` and what it started, also what has a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        if offline:
            os.kill(-1, signal.SIGKILL)  # all other processes of this namespace
        else:
            os.kill(child, signal.SIGKILL)  # where it has no group of its own yet
            os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                if not offline:
                    kill_children()
                signal.sigtimedwait([signal.SIGCHLD], 0.01)


def kill_children() -> None:
    """Kill what the kernel states to be children of this process: those of the program, once that has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(CHILDREN) as file:  # noqa: PTH123
        for number in file.read().split():
            os.kill(int(number), signal.SIGKILL)


if __name__ == "__main__":
    main()
