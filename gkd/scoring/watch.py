"""The driver's view of the models that score: who serves, who has died or hangs, and who comes back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from gkd.cluster.health.fleet import Health, HealthEvent
from gkd.cluster.health.watched import RestartPolicy, WatchedGroup
from gkd.cluster.workers.group import Group, gather
from gkd.errors import RunFailed

log = logging.getLogger("gkd")
REASON_TIMEOUT_S = 60.0
"""Time that Ray has to find out why a replica serves no more."""


class ExpectedReplica(NamedTuple):
    """A replica that may be away for ``within_s``: requests are to wait for it where there is no other one.

    ``name`` is the address that its clients began with, ``address`` where it is or comes back. While it is ``suspect``
    requests go to others where there are any.
    """

    model: str
    name: str
    within_s: float
    address: str
    suspect: bool = False


class ScorerReplicas(WatchedGroup):
    """The workers of one ``model`` that scores, each of which serves from the start, at its one of ``addresses``.

    These change where a replica is started on another node. ``request_timeout_s`` is that of its clients.
    """

    def __init__(
        self, model: str, group: Group, addresses: list[str], request_timeout_s: float, restart_policy: RestartPolicy
    ) -> None:
        setting = f"{model.partition(':')[0]}.request_timeout_s"
        super().__init__(model, group, request_timeout_s, setting, restart_policy)
        self.addresses, self.names = addresses, tuple(addresses)
        self.request_timeout_s, self.start_timeout_s = request_timeout_s, restart_policy.within_s
        self.calls: dict[Any, int] = {}
        """Calls that end only when one fails: which replica's."""
        for member in self.fleet.working:
            self.serve(member)

    def serve(self, member: int) -> None:
        """Have a replica answer."""
        self.calls[self.group.select([member]).submit("serve", activity="serving").refs[0]] = member

    def expect_replica(self, member: int, within_s: float) -> ExpectedReplica:
        """Return what clients are informed of a replica that may be away for ``within_s``."""
        suspect = self.fleet.health(member) is Health.SUSPECT
        return ExpectedReplica(self.fleet.name, self.names[member], within_s, self.addresses[member], suspect)


class ScorerWatch:
    """Watches the replicas of teachers, reference and reward model, and has them come back.

    When one dies its clients try another one at once, and the new one at its address as soon as it is there; where no
    other is there they wait for it, and where none comes back the run fails. One hangs, and is ended, that has requests
    and finishes no step of its engine for the ``request_timeout_s`` of the clients.
    """

    def __init__(self, models: Sequence[ScorerReplicas]) -> None:
        self._models = models
        self._expected: list[ExpectedReplica] = []

    @property
    def calls(self) -> list[Any]:
        """What ``ray.wait`` is to wait for; one that is done goes to :meth:`lose`."""
        return [call for replicas in self._models for call in replicas.calls]

    @property
    def groups(self) -> list[Group]:
        """The replicas that are there, by model."""
        return [replicas.group.select(replicas.fleet.present) for replicas in self._models]

    def lose(self, call: Any) -> None:
        """Note that a replica serves no more.

        Raises what ended it where none of its model is there or comes back, and ControlLost where that cannot be known.
        """
        replicas = next(replicas for replicas in self._models if call in replicas.calls)
        member = replicas.calls[call]
        replica = replicas.group.select([member])
        failure: Exception = RunFailed(f"{replica.reports[0]} stopped serving by itself")
        try:
            gather([replica.as_pending("serving", [call])], REASON_TIMEOUT_S)
        except RunFailed as error:
            failure = error
        self._lose(replicas, member, failure)

    def _lose(self, replicas: ScorerReplicas, member: int, failure: Exception) -> None:
        replicas.calls = {call: other for call, other in replicas.calls.items() if other != member}
        then = replicas.lose(member, failure)
        model, others = replicas.fleet.name, len(replicas.fleet.present)
        where = f"goes to {others} other{'s' * (others > 1)}" if others else "waits for it"
        log.warning("%s; what %s is to score %s; %s", failure, model, where, then, extra={"kind": "death"})
        self._expected.append(replicas.expect_replica(member, replicas.start_timeout_s))

    def poll(self) -> list[ExpectedReplica]:
        """Take back replicas that were started again, and end those that hang; to be called every second or so.

        Returns what clients are to wait for that was not returned before. Raises as :meth:`lose`.
        """
        for replicas in self._models:
            self._take_in_restarted(replicas)
            self._end_hanging(replicas)
        expected, self._expected = self._expected, []
        return expected

    def _take_in_restarted(self, replicas: ScorerReplicas) -> None:
        """Have new replicas answer; clients shake hands with them by themselves."""
        for member, text in replicas.take_in_restarted().items():
            replicas.serve(member)
            replicas.fleet.change(member, HealthEvent.READY)
            if replicas.addresses[member] != replicas.names[member]:
                self._expected.append(replicas.expect_replica(member, replicas.request_timeout_s))
            log.info(text, extra={"kind": "restart"})

    def _end_hanging(self, replicas: ScorerReplicas) -> None:
        fleet = replicas.fleet
        before = set(fleet.members(Health.SUSPECT))
        hanging = replicas.find_hanging(fleet.working)
        suspect = fleet.members(Health.SUSPECT)
        for member in before.symmetric_difference(suspect):
            within_s = replicas.request_timeout_s if member in suspect else 0.0
            self._expected.append(replicas.expect_replica(member, within_s))
        for member, failure in hanging.items():
            self._lose(replicas, member, failure)

    def list_absent_replicas(self) -> list[ExpectedReplica]:
        """Return the replicas that are being started now, have moved, or are suspect; for clients that begin."""
        return [
            replicas.expect_replica(member, replicas.start_timeout_s)
            for replicas in self._models
            for member, name in enumerate(replicas.names)
            if replicas.fleet.health(member) is not Health.HEALTHY or name != replicas.addresses[member]
        ]
