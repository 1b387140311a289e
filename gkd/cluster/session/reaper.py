"""Ending every process of a private Ray, also when the driver was killed and can end nothing itself.

Ray ties its servers' lives to the driver's, but its agents outlive them by minutes when the driver dies of SIGKILL,
and what a worker started may outlive that worker. All of them hold log files open for writing in the run's own Ray
directory, and nobody else does, so that is how they are found: no process is ended by name.

Run as a program, ``python reaper.py DIRECTORY`` waits until its standard input closes, which happens when the driver
is killed, and then ends what is left and removes the directory; a driver that lives dismisses it. Where it was killed
as well, the next run does both (:func:`clear`): the driver holds a lock on its directory. While it waits it writes down
the shared memory that processes of the directory have mapped: once they are killed nothing else states whose it was. It
imports only a little of the standard library, so that it costs nothing while it waits.

``python reaper.py PID`` waits for a worker of a cluster's Ray, of which no directory is the run's own, and removes the
shared memory of it and its children.
"""

import contextlib
import fcntl
import os
import select
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
REMOVE_S = 2.0
NEW_S = 60.0
SHARED = ("/dev/shm/sem.mp-", "/dev/shm/psm_", "/dev/shm/nccl-", "/dev/shm/vllm_dist_")
"""As multiprocessing, NCCL, and vLLM on CPUs name them."""
RECORD = "shared-memory"  # a file in a directory, with what its processes have mapped: number and name, line by line
RECORD_EVERY_S = 0.5
KEPT = "kept"  # a file in a directory whose logs a message has named


def processes_of(directory: str) -> list[int]:
    """Return pids of the processes, other than this one, that hold a file below ``directory`` open for writing."""
    prefix = os.path.realpath(directory) + os.sep
    return [pid for pid in list_other_processes() if _writes_below(pid, prefix)]


def list_other_processes() -> list[int]:
    """Return pids of all processes but this one."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if path.name != str(os.getpid())]


def _writes_below(pid: int, prefix: str) -> bool:
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            # The link's own permissions state how the file was opened: someone reading a log must not be ended.
            if link.lstat().st_mode & stat.S_IWUSR and str(link.readlink()).startswith(prefix):
                return True
    except OSError:  # gone meanwhile, or another user's
        return False
    return False


def end_all(directory: str, grace_s: float = GRACE_S) -> list[int]:
    """Wait ``grace_s`` seconds for the processes of ``directory`` to end by themselves, then kill until none is left.

    Returns the pids that would not end within 20 s. What they had in shared memory by name is removed.
    """
    return end(lambda: processes_of(directory), grace_s, read_record(directory))


def end(find: Callable[[], list[int]], grace_s: float, mapped: frozenset[tuple[int, str]] = frozenset()) -> list[int]:
    """Do what :func:`end_all` does to the processes that ``find`` finds; ``mapped``: what earlier ones had mapped."""
    names = mapped | list_shared_memory(find())
    deadline = time.monotonic() + grace_s + GIVE_UP_S
    kill_at = time.monotonic() + grace_s
    while (alive := find()) and time.monotonic() < deadline:
        if time.monotonic() >= kill_at:
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):  # it ended meanwhile, which is the aim
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    if not alive:
        remove_shared_memory(names)
    return alive


def is_running(pid: int) -> bool:
    """Return whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def list_shared_files() -> dict[int, str]:
    """Return the files of named semaphores and shared memory on this machine, by their numbers."""
    files: dict[int, str] = {}
    for path in Path("/dev/shm").glob("*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if str(path).startswith(SHARED):
                files[path.stat().st_ino] = str(path)
    return files


def list_shared_memory(pids: list[int]) -> frozenset[tuple[int, str]]:
    """Return number and name of the files of named semaphores and shared memory that processes have mapped.

    They belong to the system, and what would remove them at a process's end does not when that is killed.
    """
    files = list_shared_files()
    mapped_files: set[int] = set()
    for pid in pids if files else []:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except OSError:  # gone meanwhile
            continue
        # By number: a semaphore has another name in the process that made it.
        mapped_files.update(int(line.split()[4]) for line in maps.splitlines() if "/dev/shm/" in line)
    return frozenset((number, name) for number, name in files.items() if number in mapped_files)


def record(directory: str, looked: dict[int, int]) -> None:
    """Add to the record of ``directory`` what its processes have mapped of the files that are new.

    ``looked``: how often each file's owner was looked for; it is twice, as one may be mapped just after it is made.
    """
    lines = "".join(f"{number} {name}\n" for number, name in _new_memory(lambda: processes_of(directory), looked))
    if lines:
        with contextlib.suppress(OSError), (Path(directory) / RECORD).open("a") as file:  # the disk may be full
            file.write(lines)


def _new_memory(find: Callable[[], list[int]], looked: dict[int, int]) -> frozenset[tuple[int, str]]:
    new = {number for number in list_shared_files() if looked.get(number, 0) < 2}
    looked.update((number, looked.get(number, 0) + 1) for number in new)
    return frozenset(pair for pair in list_shared_memory(find()) if pair[0] in new) if new else frozenset()


def read_record(directory: str) -> frozenset[tuple[int, str]]:
    """Return number and name of what :func:`record` wrote down."""
    try:
        lines = (Path(directory) / RECORD).read_text().splitlines()
    except OSError:  # there is none
        return frozenset()
    pairs = (line.partition(" ") for line in lines)
    return frozenset((int(number), name) for number, _, name in pairs if number.isdigit() and name.startswith(SHARED))


def remove_shared_memory(names: frozenset[tuple[int, str]]) -> None:
    """Remove files of shared memory that no other process has any more, and that nobody has made anew since."""
    if not names:
        return
    for number, name in names - list_shared_memory(list_other_processes()):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if Path(name).stat().st_ino == number:
                Path(name).unlink()


def claim(directory: str) -> int:
    """Hold ``directory`` as this process's own; the descriptor is to be open for as long as it lives."""
    descriptor = os.open(directory, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def keep(directory: str) -> None:
    """Have :func:`clear` leave a directory alone, for its logs."""
    (Path(directory) / KEPT).touch()


def remove(directory: str) -> bool:
    """Remove a directory, again where something was written into it meanwhile. Return whether it is gone."""
    deadline = time.monotonic() + REMOVE_S
    while True:
        shutil.rmtree(directory, ignore_errors=True)
        gone = not Path(directory).exists()
        if gone or time.monotonic() >= deadline:
            return gone
        time.sleep(0.05)


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
            if remove(str(path)):
                removed.append(str(path))
        finally:
            os.close(descriptor)
    return removed


def watch(watched: str) -> "subprocess.Popen[bytes]":
    """Start this file as a program for a directory, from which :func:`dismiss` sends it away, or for a process."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, watched],
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


def watch_family() -> None:
    """Start a process, once, that removes what this one and its children share by name, should they be killed together.

    It is not one of these children itself, which Ray kills with a worker.
    """
    if _watched:
        return
    starting = watch(str(os.getpid()))
    with contextlib.suppress(subprocess.TimeoutExpired):  # on a busy machine: it is as good a little later
        starting.wait(GIVE_UP_S)  # its own child goes on
    _watched.append(starting)


_watched: "list[subprocess.Popen[bytes]]" = []  # whose standard input is open for as long as this process lives


def _outlive(pid: int) -> None:
    """Wait until process ``pid``, which holds standard input open, is gone; remove what its family shared."""
    if os.fork():
        os._exit(0)
    looked: dict[int, int] = {}
    names = frozenset[tuple[int, str]]()
    while not select.select([sys.stdin], [], [], RECORD_EVERY_S)[0]:
        names |= _new_memory(lambda: _family(pid), looked)
    deadline = time.monotonic() + GIVE_UP_S
    while names and time.monotonic() < deadline:  # its children may end later
        remove_shared_memory(names)
        names &= frozenset(list_shared_files().items())
        time.sleep(0.05)


def _family(pid: int) -> list[int]:
    """Return process ``pid`` with its children, theirs, and so on."""
    parents: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            parents[int(file.parent.name)] = int(file.read_bytes().rpartition(b")")[2].split()[1])
    pids = [pid]
    for parent in pids:
        pids += [child for child, ppid in parents.items() if ppid == parent]
    return pids


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        _outlive(int(sys.argv[1]))
        sys.exit()
    recorded: dict[int, int] = {}
    while not select.select([sys.stdin], [], [], RECORD_EVERY_S)[0]:
        record(sys.argv[1], recorded)
    if not sys.stdin.buffer.read():  # closed without a word: the driver was killed
        end_all(sys.argv[1])
        remove(sys.argv[1])
