"""What this process may use of its machine: a container, or a job of Slurm's, may have less than there is.

Limits are those of Linux's control groups, of the process's own group and of those above it, and of the shell that
started it. Imports the standard library alone.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

OBJECT_STORE_SHARE, MOST_OBJECT_STORE = 0.3, 200e9  # of memory, and in bytes: what Ray gives its object store
SHARE_OF_SHM, LEAST_CAP = 0.95, 10e9  # of /dev/shm, which it does not go beyond unless that is less than so many bytes
SHM = Path("/dev/shm")
LIBRARIES = 4 << 30  # bytes of address space that a worker takes beside the object store, at least
GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
QUOTA, PERIOD = "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"
"""Of the first version of control groups."""


def memory() -> int:
    """Return bytes of memory that this process may have."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [*_read("memory.max"), *_read("memory/memory.limit_in_bytes")]
    return min([total, *(int(limit) for limit in limits if limit.isdigit() and int(limit))])


def object_store_bytes(shared_memory: float = math.inf) -> int:
    """Return the size of Ray's object store, a file that each of its processes maps whole.

    ``shared_memory``: bytes of /dev/shm, by which it is smaller where that is small.
    """
    share = float(os.environ.get("RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION", OBJECT_STORE_SHARE))
    most = float(os.environ.get("RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", MOST_OBJECT_STORE))
    return int(min(share * memory(), most, max(LEAST_CAP, SHARE_OF_SHM * shared_memory)))


def find_small_limits() -> Iterator[tuple[str, str]]:
    """Yield limits of this process with which Ray cannot start, and what to type before it is started.

    Ray states neither: its servers end, and it waits for them.
    """
    store = object_store_bytes(shutil.disk_usage(SHM).total if SHM.is_dir() else 0)
    requirements = (
        (resource.RLIMIT_FSIZE, "-f", store, "a file may have"),
        (resource.RLIMIT_AS, "-v", store + LIBRARIES, "a process may map"),
    )
    for kind, option, least, what in requirements:
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY and limit < least:
            state = f"{what} {limit / (1 << 20):,.0f} MiB (ulimit {option}), Ray needs {least / (1 << 20):,.0f}"
            yield state, f"ulimit {option} unlimited in the shell that starts it"


def cores() -> int:
    """Return the cores that this process may use, those of which it has a share of the time rounded up."""
    limits = [limit.split() for limit in _read("cpu.max")]  # microseconds, and of how many
    limits += [[quota, period] for quota, period in zip(_read(QUOTA), _read(PERIOD), strict=False)]
    shares = [int(quota) / int(period) for quota, period in limits if quota.isdigit() and int(period)]
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, shares)]))


def _read(name: str) -> Iterator[str]:
    """Yield what the file ``name`` holds for this process's group and those above it; a container's own is the top.

    In the first version each kind of limit has a tree of groups, in a folder of its name.
    """
    kind, _, file = name.rpartition("/")
    try:
        lines = [line.split(":", 2) for line in OWN.read_text().splitlines()]  # number, kinds, group
    except OSError:
        lines = []
    group_path = next((group for _, kinds, group in lines if kind in kinds.split(",")), "")
    top = GROUPS / kind
    inner = top / group_path.lstrip("/")
    for folder in (inner, *inner.parents):
        if folder.is_relative_to(top) and (folder / file).is_file():
            yield (folder / file).read_text().strip()
