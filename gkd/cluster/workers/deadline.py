"""The time that the driver waits, in which neither work that goes on nor a stop of its own counts."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_TURN_S = 5.0
"""Time between two looks after which it is this process that stood still: stopped, or with no time on its cores."""


class Deadline:
    """The time that a wait has: ``limit_s`` from now, and from when anything was last done for it.

    ``idle_s`` returns the seconds since then, and is called when the time is over; None: nobody knows. ``setting`` is
    what it comes from, for messages. For waits that look every second or so: where a scheduler or a container stops a
    whole run for a while, nothing could be done meanwhile.
    """

    def __init__(self, limit_s: float, idle_s: Callable[[], float] | None = None, setting: str = "") -> None:
        self.limit_s, self._idle_s, self._setting = limit_s, idle_s, setting
        self._looked = self._resumed = time.monotonic()
        self._stood_s = 0.0  # up to when it was last resumed
        self.end = self._looked + limit_s
        """When it is over, as far as is known (``time.monotonic``)."""

    def is_over(self) -> bool:
        """Return whether the time is over, also after a look at what was done meanwhile."""
        now = self.look()
        if self._idle_s is not None and now >= self.end:
            idle_s = self._idle_s()
            if idle_s < now - self._resumed:  # something was done since
                self._stood_s = 0.0
            self.end = now + self.limit_s - max(0.0, idle_s - self._stood_s)
        return now >= self.end

    def look(self) -> float:
        """Note that this process runs; returns the time. What it stood still before, but a moment, does not count."""
        now = time.monotonic()
        stood_s, self._looked = max(0.0, now - self._looked - LONGEST_TURN_S), now
        if stood_s:
            self._resumed, self._stood_s, self.end = now, self._stood_s + stood_s, self.end + stood_s
        return now

    def __str__(self) -> str:
        over = "not done after" if self._idle_s is None else "nothing was done for"
        return f"{over} {round(self.limit_s, 2):g} s{f' ({self._setting})' if self._setting else ''}"
