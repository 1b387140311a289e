"""What this process may use of its machine: a container, or a job of Slurm's, may have less than there is.

Limits are those of Linux's control groups, of the process's own group and of those above it. Imports the standard
library alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
QUOTA, PERIOD = "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"
"""Of the first version of control groups."""


def memory() -> int:
    """Return bytes of memory that this process may have."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [*_read("memory.max"), *_read("memory/memory.limit_in_bytes")]
    return min([total, *(int(limit) for limit in limits if limit.isdigit() and int(limit))])


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
    own = next((group for _, kinds, group in lines if kind in kinds.split(",")), "")
    top = GROUPS / kind
    inner = top / own.lstrip("/")
    for folder in (inner, *inner.parents):
        if folder.is_relative_to(top) and (folder / file).is_file():
            yield (folder / file).read_text().strip()
