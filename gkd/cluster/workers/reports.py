"""Workers' reports while a run goes on: their memory, and what they did."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from gkd.cluster.layout.assignment import Report
from gkd.cluster.workers.group import Group

log = logging.getLogger("gkd")
REPORT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's report between the driver's times ``sent`` and ``received``, seconds since 1970."""

    worker: Report
    sent: float
    received: float
    contents: dict[str, Any]


class WorkerReports:
    """Reads the reports of a run's workers, of whoever of them answers at once.

    One that does not is named once, and not waited for again until it has answered.
    """

    def __init__(self) -> None:
        self._late: dict[Any, Any] = {}  # what a worker has not answered yet, by worker
        self._named: set[Any] = set()

    def read(self, groups: Sequence[Group]) -> list[WorkerReport]:
        """Return the report of every worker that answers within :data:`REPORT_TIMEOUT_S`."""
        reports = {worker: r for g in groups for worker, r in zip(g.workers, g.reports, strict=True)}
        sent = time.time()
        calls = {worker: worker.control.remote("report") for worker in reports if not self._is_unanswered(worker)}
        refs = list(calls.values())
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=REPORT_TIMEOUT_S)[0]) if refs else set()
        received, answers = time.time(), []
        for worker, ref in calls.items():
            if ref in ready:
                with suppress(RayError):  # of one that died, which is noticed where it is needed
                    answers.append(WorkerReport(reports[worker], sent, received, ray.get(ref, timeout=1.0)))
                continue
            self._late[worker] = ref
            if worker not in self._named:
                self._named.add(worker)
                text = "%s does not report how much memory it has: no answer within %g s"
                log.warning(text, reports[worker], REPORT_TIMEOUT_S)
        return answers

    def _is_unanswered(self, worker: Any) -> bool:
        """Return whether an earlier call has not been answered."""
        if worker in self._late and ray.wait([self._late[worker]], timeout=0)[0]:
            del self._late[worker]
        return worker in self._late
