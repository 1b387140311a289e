"""How many threads a process without a GPU computes with."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

BYTES_PER_THREAD = 4 << 20
"""Of weights, a million parameters in float32. Below that, threads wait for each other for longer than they help: with
students and teachers of 0.1 and 0.6 million parameters all processes of a run take 0.84 of the CPU time on one."""
WEIGHTS = {".safetensors", ".bin"}


def compute_threads(models: Iterable[str], wanted: int | None = None) -> int:
    """Return threads for a process that has one of ``models``, directories: ``wanted``, or as many cores as are of use.

    That is one for each :data:`BYTES_PER_THREAD` of the largest model's files, and at most all that this process may
    use.
    """
    if wanted is not None:
        return wanted
    largest = max(map(_weight_bytes, models), default=0)
    return max(1, min(len(os.sched_getaffinity(0)), -(-largest // BYTES_PER_THREAD)))


def _weight_bytes(model: str) -> int:
    return sum(file.stat().st_size for file in Path(model).iterdir() if file.suffix in WEIGHTS)
