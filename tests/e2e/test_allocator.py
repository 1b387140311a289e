"""Memory that is freed and soon needed again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gkd.cluster.workers.environment import ALLOCATOR_VARIABLES

ROUNDS, PIECES, PIECE_BYTES, PAGE_BYTES = 50, 8, 1 << 20, 4096
FAULTS = f"""
import resource, sys, torch
from gkd.cluster.workers.environment import allocate_by, environment
if sys.argv[1] == "kept":
    allocate_by(environment("cpu", []))

def work(rounds):
    for _ in range(rounds):
        pieces = [torch.ones({PIECE_BYTES}, dtype=torch.uint8) for _ in range({PIECES})]
        del pieces
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

print(-work(2) + work({ROUNDS}))
"""


def faults(kind: str, **variables: str) -> int:
    inherited = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_VARIABLES}
    program = subprocess.run(
        [sys.executable, "-c", FAULTS, kind],
        env=inherited | variables,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return int(program.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_memory_that_is_kept_is_not_mapped_again() -> None:
    mapped = ROUNDS * PIECES * PIECE_BYTES // PAGE_BYTES
    # glibc's own limit, which it would raise by what is freed, at times so far that nothing is given back.
    assert faults("given back", MALLOC_MMAP_THRESHOLD_=str(128 << 10)) > mapped / 2
    assert faults("kept") < mapped / 20
