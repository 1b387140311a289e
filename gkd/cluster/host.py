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
    """Yield what the file ``name`` holds for this process's group and those above it; a container's own is the top."""
    try:
        own = [line.removeprefix("0::/") for line in OWN.read_text().splitlines() if line.startswith("0::/")]
    except OSError:
        own = []
    inner = GROUPS / "".join(own)
    for folder in (inner, *inner.parents):
        if folder.is_relative_to(GROUPS) and (folder / name).is_file():
            yield (folder / name).read_text().strip()
