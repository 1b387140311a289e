"""Calls that may never return, each with a deadline; and the end of a program also where one has not returned."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from gkd.cluster.signals import ENDING

LOG = logging.getLogger("gkd")
_stuck: list[str] = []


def within(timeout_s: float, what: str, call: Callable[[], object]) -> bool:
    """Run ``call`` in a thread of its own for at most ``timeout_s`` seconds; returns whether it came to its end.

    Raises what it raises. One that does not return is named in a warning and left behind: :func:`leave` ends the
    process without it.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        abandon(what)
        LOG.warning("%s: not done after %g s; the program ends without it", what, timeout_s)
        return False
    if raised:
        raise raised[0]
    return True


def abandon(what: str) -> None:
    """Have :func:`leave` end the process at once: ``what`` has not been done and cannot be."""
    _stuck.append(what)


def leave(code: int) -> NoReturn:
    """End the program with ``code``, at once where a call is stuck: what Python does at its end could wait for it."""
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)  # the code is settled
    if not _stuck:
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
