"""Finds engines, and replicas of scorers, that have work and do none: stopped, or hanging in a kernel or a driver."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from gkd.cluster.workers.deadline import LONGEST_TURN_S
from gkd.cluster.workers.group import Group


@dataclass
class _Beat:
    """The time that one engine has shown no progress."""

    silent_s: float = 0.0
    progress: tuple[int, int] | None = None
    pending: Any = None
    called_at: float = 0.0


class Heartbeat:
    """Watches engines' progress, on their workers' other threads.

    An engine hangs that has had work for ``timeout_s`` and either has not answered in that time or has made no forward
    pass with requests unfinished. Waiting for the scorers of its samples is no hanging.
    """

    def __init__(self, group: Group, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s
        self._beats = [_Beat() for _ in range(len(group))]
        self._looked = time.monotonic()

    def find_hanging(self, busy: Iterable[int]) -> list[int]:
        """Return those of the ``busy`` engines that hang. To be called every second or so while engines have work."""
        now = time.monotonic()
        longest = min(LONGEST_TURN_S, self._timeout_s / 5)  # so that an engine is called several times
        passed, self._looked = min(now - self._looked, longest), now
        hanging, at_work = [], set(busy)
        for engine, beat in enumerate(self._beats):
            if engine not in at_work:  # it has nothing to do
                beat.silent_s = 0.0
                continue
            beat.silent_s += passed
            self._poll(engine, beat, now)
            if beat.silent_s > self._timeout_s:
                hanging.append(engine)
        return hanging

    def measure_silence_s(self, engine: int) -> float:
        """Return for how long an engine has shown no progress, as of the last look at it."""
        return self._beats[engine].silent_s

    def replace(self, engine: int, group: Group) -> None:
        """Watch the new worker of an engine, in ``group``, from now on."""
        self._group, self._beats[engine] = group, _Beat()

    def begin(self) -> None:
        """Note that new work begins: silence is counted from now on."""
        for beat in self._beats:
            beat.silent_s = 0.0
        self._looked = time.monotonic()

    def _poll(self, engine: int, beat: _Beat, now: float) -> None:
        if beat.pending is None:
            if now - beat.called_at > min(5.0, self._timeout_s / 5):
                (beat.pending,), beat.called_at = self._group.select([engine]).submit_control("progress").refs, now
            return
        ready, _ = ray.wait([beat.pending], timeout=0)
        if not ready:
            return
        try:
            progress: tuple[int, int] = ray.get(ready[0], timeout=1.0)
        except RayError:  # it died, which its stream reports as well
            return
        finally:
            beat.pending = None
        _, unfinished = progress
        if progress != beat.progress or unfinished == 0:
            beat.silent_s = 0.0
        beat.progress = progress
