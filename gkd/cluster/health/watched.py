"""Groups whose workers may hang or die, engines and replicas of scorers: others do their work while they are started
again beside the run.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from gkd.cluster.health.fleet import Fleet, Health, HealthEvent
from gkd.cluster.health.heartbeat import Heartbeat
from gkd.cluster.layout.assignment import Report
from gkd.cluster.workers.failure import NodeLost, WorkerDied, WorkerHung
from gkd.cluster.workers.group import Group
from gkd.errors import one_line

log = logging.getLogger("gkd")


def return_text(new: Report, old: Report) -> str:
    """Return the message of a new worker in place of one that died."""
    where = "" if new.node_id == old.node_id else f", on other GPUs ({','.join(new.gpu_uuids)}): {old.node} has left"
    return f"{new} is there in place of the one that died{where}"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The way members of a group are started again, at most ``limit`` times each.

    ``start`` gets the number of a member and returns its new worker, built, as a group of one. It is called on a thread
    of its own, ends when that worker does, and raises where nothing comes of it. ``obstacle`` is why no member can be;
    None: they can.
    """

    limit: int
    start: Callable[[int], Group]
    threads: list[threading.Thread]
    """To be joined once the workers were ended, before Ray is left."""
    obstacle: str | None = None
    within_s: float = math.inf
    """A start that takes longer is named: calls into Ray have no deadlines of their own."""


class WatchedGroup:
    """The workers of ``group``, called ``name`` together, and in :attr:`fleet` the state of each.

    One that does nothing for ``timeout_s`` while it has work hangs; ``setting`` is that of the time. One that died is
    started again by ``restart_policy``; without it none is.
    """

    def __init__(
        self, name: str, group: Group, timeout_s: float, setting: str, restart_policy: RestartPolicy | None
    ) -> None:
        self.group = group
        """The workers, those that died included."""
        self.fleet, self.heartbeat = Fleet(name, len(group)), Heartbeat(group, timeout_s)
        self._timeout_s, self._setting, self._restart_policy = timeout_s, setting, restart_policy
        self._starting: dict[int, Future[Group]] = {}
        self._late: dict[int, float] = {}  # when (time.monotonic) a start is to be named that goes on, by member

    def find_hanging(self, busy: Sequence[int]) -> dict[int, WorkerHung]:
        """Return those of the ``busy`` members that do nothing; half of that time makes one suspect."""
        hanging = self.heartbeat.find_hanging(busy)
        silent = {member for member in busy if self.heartbeat.measure_silence_s(member) > self._timeout_s / 2}
        for member in silent.symmetric_difference(self.fleet.members(Health.SUSPECT)):
            self.fleet.change(member, HealthEvent.SILENT if member in silent else HealthEvent.ANSWERED)
        limit = f"{self._timeout_s:g} s ({self._setting})"
        return {i: WorkerHung(f"{self.group.reports[i]} has done nothing for {limit}") for i in hanging}

    def lose(self, member: int, failure: Exception, final: bool = False) -> str:
        """Note that a member died, or hangs and is ended, and begin to start it again or give it up.

        Returns which, for messages. ``final``: no further attempt will do. Raises ``failure`` where no member is there
        and none will be.
        """
        if isinstance(failure, WorkerHung):
            self.group.end(member)
        self.fleet.change(member, HealthEvent.DIED)
        restart_policy, number = self._restart_policy, self.fleet.restarts(member) + 1
        if (
            restart_policy is not None
            and restart_policy.obstacle is None
            and number <= restart_policy.limit
            and not final
        ):
            self.fleet.change(member, HealthEvent.RESTARTED)
            self._begin(member, restart_policy)
            return f"it is started again ({number} of cluster.worker_restarts={restart_policy.limit})"
        self.fleet.change(member, HealthEvent.GIVEN_UP)
        if not self.fleet.members(*(set(Health) - {Health.RETIRED, Health.DEAD})):
            raise failure
        if restart_policy is None or final:
            return "it is given up"
        return f"it is given up: {restart_policy.obstacle or f'cluster.worker_restarts={restart_policy.limit}'}"

    def _begin(self, member: int, restart_policy: RestartPolicy) -> None:
        future = self._starting[member] = Future[Group]()
        self._late[member] = time.monotonic() + restart_policy.within_s

        def run() -> None:
            try:
                future.set_result(restart_policy.start(member))
            except BaseException as error:
                future.set_exception(error)

        # A pool's threads would be waited for when the process ends, however long a model takes to load.
        thread = threading.Thread(target=run, name=f"restart-{self.fleet.name}-{member}", daemon=True)
        restart_policy.threads.append(thread)
        thread.start()

    def take_in_restarted(self) -> dict[int, str]:
        """Take in the new workers that are there now, whose members are STALE; returns a line on each, by member.

        Raises WorkerDied where one did not start, none is there and none will be.
        """
        texts: dict[int, str] = {}
        self._name_late()
        for member, future in [(member, future) for member, future in self._starting.items() if future.done()]:
            del self._starting[member]
            self._late.pop(member, None)
            error = future.exception()
            if error is None:
                worker = future.result()
                texts[member] = return_text(worker.reports[0], self.group.reports[member])
                self.group = self.group.replace_worker(member, worker)
                self.heartbeat.replace(member, self.group)
                self.fleet.change(member, HealthEvent.STARTED)
                continue
            failure = WorkerDied(
                f"a new worker in place of {self.fleet.name} {member} did not start: {one_line(error)}"
            )
            failure.__cause__ = error
            then = self.lose(member, failure, isinstance(error, NodeLost))
            log.warning("%s; %s", failure, then, extra={"kind": "death"})
        return texts

    def _name_late(self) -> None:
        for member in [member for member, at in self._late.items() if time.monotonic() > at]:
            del self._late[member]
            if self._restart_policy is not None and not self._starting[member].done():
                log.warning("a new worker in place of %s %d is not there after %g s; it is waited for: Ray's control "
                            "service may hang", self.fleet.name, member, self._restart_policy.within_s)  # fmt: skip
