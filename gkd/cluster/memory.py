"""memory/* of a step: what the workers say of their memory, those that answer at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from gkd.cluster.group import Group

LOG = logging.getLogger("gkd")
TIMEOUT_S = 5.0


class MemoryReports:
    """Asks every worker of a run. One that does not answer is named once, and not waited for again until it does."""

    def __init__(self) -> None:
        self._late: dict[Any, Any] = {}  # what a worker has not answered yet, by worker
        self._reported: set[Any] = set()

    def read(self, groups: Sequence[Group]) -> dict[str, float]:
        """memory/GROUP/*: the largest over a group's workers, without what nobody could measure."""
        reports = {worker: str(r) for g in groups for worker, r in zip(g.workers, g.reports, strict=True)}
        calls = {worker: worker.control.remote("memory") for worker in reports if not self._waits(worker)}
        ready = set(ray.wait(list(calls.values()), num_returns=len(calls), timeout=TIMEOUT_S)[0]) if calls else set()
        for worker, ref in calls.items():
            if ref not in ready:
                self._late[worker] = ref
                self._report(worker, reports[worker])
        rows: dict[str, float] = {}
        for group in groups:
            for worker in group.workers:
                for key, value in _answer(calls.get(worker), ready).items():
                    name = f"memory/{group.name}/{key}"
                    rows[name] = max(value, rows.get(name, value))
        return dict(sorted(rows.items()))

    def _waits(self, worker: Any) -> bool:
        """Whether an earlier call has not been answered."""
        if worker in self._late and ray.wait([self._late[worker]], timeout=0)[0]:
            del self._late[worker]
        return worker in self._late

    def _report(self, worker: Any, who: str) -> None:
        if worker not in self._reported:
            self._reported.add(worker)
            LOG.warning("%s does not say how much memory it has: no answer within %g s", who, TIMEOUT_S)


def _answer(ref: Any, ready: set[Any]) -> dict[str, float]:
    """What a worker measured; nothing of one that is late or has died."""
    if ref not in ready:
        return {}
    try:
        found: dict[str, float] = ray.get(ref, timeout=1.0)
    except RayError:  # it died, which is noticed where it is needed
        return {}
    return found
