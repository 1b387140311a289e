"""Ending every process of a private Ray, also when the driver was killed and can end nothing itself.

Ray ties its servers' lives to the driver's, but its agents outlive them by minutes when the driver dies of SIGKILL,
and what a worker started may outlive that worker. All of them hold log files open for writing in the run's own Ray
directory, and nobody else does, so that is how they are found: no process is ended by name.

Run as a program, ``python reaper.py DIRECTORY`` waits until its standard input closes, which happens when the driver
is killed, and then ends what is left and removes the directory; a driver that lives dismisses it. Where it was killed
as well, the next run does both (:func:`clear`): the driver holds a lock on its directory. It imports only a little of
the standard library, so that it costs nothing while it waits.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

GRACE_S = 2.0  # Ray's own way of ending goes first, so that workers can end their children
GIVE_UP_S = 20.0
NEW_S = 60.0
SHARED = ("/dev/shm/sem.mp-", "/dev/shm/psm_")  # as multiprocessing names them
KEPT = "kept"  # a file in a directory whose logs a message has named


def processes_of(directory: str) -> list[int]:
    """Return pids of the processes, other than this one, that hold a file below ``directory`` open for writing."""
    prefix = os.path.realpath(directory) + os.sep
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if pid != os.getpid() and _writes_below(pid, prefix)]


def _writes_below(pid: int, prefix: str) -> bool:
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            # The link's own permissions say how the file was opened: someone reading a log must not be ended.
            if link.lstat().st_mode & stat.S_IWUSR and str(link.readlink()).startswith(prefix):
                return True
    except OSError:  # gone meanwhile, or another user's
        return False
    return False


def end_all(directory: str, grace_s: float = GRACE_S) -> list[int]:
    """Wait ``grace_s`` seconds for the processes of ``directory`` to end by themselves, then kill until none is left.

    Returns the pids that would not end within 20 s. What they had in shared memory by name is removed.
    """
    names = shared_memory(processes_of(directory))
    left = end(lambda: processes_of(directory), grace_s)
    if not left:
        _remove(names)
    return left


def shared_memory(pids: list[int]) -> set[str]:
    """Return files of Python's named semaphores and shared memory that processes have mapped.

    They belong to the system, and what would remove them at a process's end does not when that is killed.
    """
    files: dict[int, str] = {}
    for path in Path("/dev/shm").glob("*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if str(path).startswith(SHARED):
                files[path.stat().st_ino] = str(path)
    mapped_files: set[str] = set()
    for pid in pids if files else []:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except OSError:  # gone meanwhile
            continue
        # By number: a semaphore has another name in the process that made it.
        mapped = (line.split()[4] for line in maps.splitlines() if "/dev/shm/" in line)
        mapped_files.update(files[int(number)] for number in mapped if int(number) in files)
    return mapped_files


def _remove(names: set[str]) -> None:
    """Remove files of shared memory that no process has any more."""
    if not names:
        return
    used = shared_memory([int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()])
    for name in names - used:
        Path(name).unlink(missing_ok=True)


def end(find: Callable[[], list[int]], grace_s: float) -> list[int]:
    """Do what :func:`end_all` does to the processes that ``find`` finds."""
    deadline = time.monotonic() + grace_s + GIVE_UP_S
    kill_at = time.monotonic() + grace_s
    while (left := find()) and time.monotonic() < deadline:
        if time.monotonic() >= kill_at:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:  # it ended meanwhile, which is the aim
                    continue
        time.sleep(0.05)
    return left


def claim(directory: str) -> int:
    """Hold ``directory`` as this process's own; the descriptor is to be open for as long as it lives."""
    descriptor = os.open(directory, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def keep(directory: str) -> None:
    """Have :func:`clear` leave a directory alone, for its logs."""
    (Path(directory) / KEPT).touch()


def clear(base: str, prefix: str) -> list[str]:
    """Remove the directories of this user's runs in ``base`` whose driver is gone, with their processes.

    Returns them. Those of living drivers are locked; one that was made a moment ago may not be yet.
    """
    removed = []
    for path in Path(base).glob(f"{prefix}*"):
        try:
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or (path / KEPT).exists():
                continue
            if time.time() - status.st_mtime < NEW_S:
                continue
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:  # another run removes it at the same time
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            end_all(str(path), grace_s=0)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(str(path))
        finally:
            os.close(descriptor)
    return removed


def watch(directory: str) -> "subprocess.Popen[bytes]":
    """Start a process that ends those of ``directory`` when this one is gone; :func:`dismiss` sends it away."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C goes to the whole foreground group and must not reach it
    )


def dismiss(watchdog: "subprocess.Popen[bytes]") -> None:
    """Send a watching process away: this one has ended what there was, and goes on itself."""
    try:
        watchdog.communicate(b"done", timeout=GIVE_UP_S)
    except subprocess.TimeoutExpired:  # there is nothing left that it could do
        watchdog.kill()


if __name__ == "__main__":
    if not sys.stdin.buffer.read():  # closed without a word: the driver was killed
        end_all(sys.argv[1])
        shutil.rmtree(sys.argv[1], ignore_errors=True)
