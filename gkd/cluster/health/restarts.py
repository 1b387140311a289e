"""Workers that come back: what dies is started again beside the run, while others do its work."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from gkd.cluster.health.fleet import Fleet, Health, HealthEvent
from gkd.cluster.layout.assignment import Report
from gkd.cluster.workers.failure import NodeLost, WorkerDied
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


class Restarts:
    """Keeps count of one ``group`` of ``fleet``, and starts again what dies; without ``restart_policy`` nothing."""

    def __init__(self, fleet: Fleet, group: str, restart_policy: RestartPolicy | None = None) -> None:
        self.fleet, self.group, self._restart_policy = fleet, group, restart_policy
        self._starting: dict[int, Future[Group]] = {}
        self._late: dict[int, float] = {}  # when (time.monotonic) a start is to be named that goes on, by member

    def lose(self, member: int, failure: Exception, final: bool = False) -> str:
        """Note that a member died, and begin to start it again or give it up; returns which, for messages.

        ``final``: no further attempt will do. Raises ``failure`` where no member is there and none will be.
        """
        self.fleet.change(self.group, member, HealthEvent.DIED)
        restart_policy, number = self._restart_policy, self.fleet.restarts(self.group, member) + 1
        if (
            restart_policy is not None
            and restart_policy.obstacle is None
            and number <= restart_policy.limit
            and not final
        ):
            self.fleet.change(self.group, member, HealthEvent.RESTARTED)
            self._begin(member, restart_policy)
            return f"it is started again ({number} of cluster.worker_restarts={restart_policy.limit})"
        self.fleet.change(self.group, member, HealthEvent.GIVEN_UP)
        if not self.fleet.members(self.group, *(set(Health) - {Health.RETIRED, Health.DEAD})):
            raise failure
        if restart_policy is None or final:
            return "it is given up"
        return f"it is given up: {restart_policy.obstacle or f'cluster.worker_restarts={restart_policy.limit}'}"

    def _begin(self, member: int, restart_policy: RestartPolicy) -> None:
        done = self._starting[member] = Future[Group]()
        self._late[member] = time.monotonic() + restart_policy.within_s

        def run() -> None:
            try:
                done.set_result(restart_policy.start(member))
            except BaseException as error:
                done.set_exception(error)

        # A pool's threads would be waited for when the process ends, however long a model takes to load.
        thread = threading.Thread(target=run, name=f"restart-{self.group}-{member}", daemon=True)
        restart_policy.threads.append(thread)
        thread.start()

    def take(self) -> dict[int, Group]:
        """Return, as groups of one, the new workers that are there now; their members are STALE.

        Raises WorkerDied where one did not start, none is there and none will be.
        """
        started: dict[int, Group] = {}
        self._name_late()
        for member, done in [(member, done) for member, done in self._starting.items() if done.done()]:
            del self._starting[member]
            self._late.pop(member, None)
            error = done.exception()
            if error is None:
                self.fleet.change(self.group, member, HealthEvent.STARTED)
                started[member] = done.result()
                continue
            failure = WorkerDied(f"a new worker in place of {self.group} {member} did not start: {one_line(error)}")
            failure.__cause__ = error
            then = self.lose(member, failure, isinstance(error, NodeLost))
            log.warning("%s; %s", failure, then, extra={"kind": "death"})
        return started

    def _name_late(self) -> None:
        for member in [member for member, at in self._late.items() if time.monotonic() > at]:
            del self._late[member]
            if self._restart_policy is not None and not self._starting[member].done():
                log.warning("a new worker in place of %s %d is not there after %g s; it is waited for: Ray's control "
                            "service may hang", self.group, member, self._restart_policy.within_s)  # fmt: skip
