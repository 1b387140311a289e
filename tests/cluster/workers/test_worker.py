"""A method of a part that a worker does not have yet; what garbage collections of a run search."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from gkd.cluster.workers.heap import freeze_heap_meanwhile
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


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()  # what tests/conftest.py has frozen
    yield
    gc.freeze()


def test_what_was_there_before_a_run_is_searched_again_after_it(nothing_frozen: None) -> None:
    before = [[]]  # type: ignore[var-annotated]
    garbage = set[object]()  # of which a weak reference can be had, in a cycle
    cycle = [garbage]
    garbage_is_there, holder = weakref.ref(garbage), Loaded()
    holder.cycle, holder.itself = cycle, holder  # type: ignore[attr-defined]
    del garbage, cycle, holder
    with freeze_heap_meanwhile():
        assert garbage_is_there() is None
        made = [[]]  # type: ignore[var-annotated]
        searched = {id(x) for x in gc.get_objects()}
        assert id(made) in searched
        assert id(before) not in searched
    assert gc.get_freeze_count() == 0
    assert any(x is before for x in gc.get_objects())
