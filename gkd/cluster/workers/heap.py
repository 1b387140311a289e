"""Python's garbage collections, which search every object: when there are none, and what they leave out."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Collect no garbage meanwhile: what imports make stays, and searching it is a fifth of their time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def freeze_heap() -> None:
    """Collect garbage, and leave what remains out of later collections.

    What imports and models made stays as long as the process does: to search it takes 0.2 to 0.3 s, at some moment of a
    step for which all others then wait.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def freeze_heap_meanwhile() -> Iterator[None]:
    """Do so for a time: a program of the user's may go on with other things."""
    freeze_heap()
    try:
        yield
    finally:
        gc.unfreeze()
