"""Shared memory that is removed after processes were killed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gkd.cluster.session.reaper import remove_shared_memory


def test_memory_that_somebody_has_made_anew_by_the_same_name_stays() -> None:
    descriptor, name = tempfile.mkstemp(prefix="psm_", dir="/dev/shm")
    try:
        number = os.fstat(descriptor).st_ino
        remove_shared_memory(frozenset({(number + 1, name)}))
        assert Path(name).exists()
        remove_shared_memory(frozenset({(number, name)}))
        assert not Path(name).exists()
    finally:
        os.close(descriptor)
        Path(name).unlink(missing_ok=True)
