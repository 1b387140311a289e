"""SIGTERM and Ctrl-C: an orderly way out, whatever Ray does to the handlers."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_received: list[int] = []


def exit_on_signals() -> None:
    """Turn SIGTERM and SIGINT into SystemExit (143, 130), so that everything open is closed. Main thread only."""
    _received.clear()

    def leave(number: int, _: FrameType | None) -> None:
        _received.append(number)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)


@contextlib.contextmanager
def keeping_exit_code() -> Iterator[None]:
    """Leave with 128 + the signal's number also where the signal came during a call into Ray, which makes it 0 or 1."""
    try:
        yield
    except SystemExit:
        if _received:
            raise SystemExit(128 + _received[0]) from None
        raise


@contextlib.contextmanager
def keeping_sigterm_handler() -> Iterator[None]:
    """Put the SIGTERM handler back that ``ray.init`` replaces by its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not signal.SIG_DFL:  # Ray's own at least exits in order
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def ignoring_signals() -> Iterator[None]:
    """Let a clean-up of bounded length finish, also when Ctrl-C is pressed again."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
