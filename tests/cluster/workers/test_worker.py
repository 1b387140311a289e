"""A method of a part that a worker does not have yet."""

from __future__ import annotations

import pytest

from gkd.cluster.workers.worker import Worker
from gkd.errors import RunFailed


class Loaded:
    state: list[int]


def test_a_part_that_is_not_loaded_yet_is_named() -> None:
    """As a rank's state, asked for by a run that ends while the rank reads the student."""
    worker = object.__new__(Worker)
    worker._object = None
    with pytest.raises(RunFailed, match=r"state\.copy"):
        worker.control("state.copy")
    worker._object = Loaded()
    with pytest.raises(RunFailed, match=r"state\.copy"):
        worker.control("state.copy")
    worker._object.state = [1, 2]
    assert worker.control("state.copy") == [1, 2]
