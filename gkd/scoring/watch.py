"""The driver's view of the models that score: who serves, who has died or hangs, and who comes back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gkd.cluster.health.fleet import PRESENT, WORKING, Fleet, Health, HealthEvent
from gkd.cluster.health.heartbeat import Heartbeat
from gkd.cluster.health.restarts import RestartPolicy, Restarts, return_text
from gkd.cluster.workers.failure import WorkerHung
from gkd.cluster.workers.group import Group, PendingCall, gather
from gkd.errors import ConfigError, RunFailed

log = logging.getLogger("gkd")
REASON_TIMEOUT_S = 60.0
"""Time that Ray has to find out why a replica serves no more."""


@dataclass(frozen=True, slots=True)
class ScorerModel:
    """One model that scores: its replicas' workers, where these listen, and what is known of them.

    ``addresses`` change where a replica is started on another node. ``request_timeout_s`` of its clients;
    ``start_timeout_s`` a replica has to come back, by ``restart_policy``.
    """

    group: Group
    serving: PendingCall
    addresses: list[str]
    request_timeout_s: float
    start_timeout_s: float
    restart_policy: RestartPolicy | None = None


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


@dataclass(slots=True)
class _Replicas:
    """The replicas of one model."""

    of: ScorerModel
    group: Group
    heartbeat: Heartbeat
    restarts: Restarts
    names: tuple[str, ...]
    """The addresses at first."""
    calls: dict[Any, int] = field(default_factory=dict)
    """Calls that end only when one fails: which replica's."""


class ScorerWatch:
    """Watches the replicas of teachers, reference and reward model, ``models`` by name, and has them come back.

    When one dies its clients try another one at once, and the new one at its address as soon as it is there; where no
    other is there they wait for it, and where none comes back the run fails. One hangs, and is ended, that has requests
    and finishes no step of its engine for the ``request_timeout_s`` of the clients.
    """

    def __init__(self, models: Mapping[str, ScorerModel], fleet: Fleet) -> None:
        self.fleet = fleet
        self._models: dict[str, _Replicas] = {}
        self._expected: list[ExpectedReplica] = []
        for model, its in models.items():
            fleet.add(model, len(its.group))
            heartbeat = Heartbeat(its.group, its.request_timeout_s)
            replicas = _Replicas(
                its, its.group, heartbeat, Restarts(fleet, model, its.restart_policy), tuple(its.addresses)
            )
            replicas.calls = {ref: member for member, ref in enumerate(its.serving.refs)}
            self._models[model] = replicas

    @property
    def calls(self) -> list[Any]:
        """What ``ray.wait`` is to wait for; one that is done goes to :meth:`lose`."""
        return [call for replicas in self._models.values() for call in replicas.calls]

    @property
    def groups(self) -> list[Group]:
        """The replicas that are there, by model."""
        return [its.group.select(self.fleet.members(model, *PRESENT)) for model, its in self._models.items()]

    def lose(self, call: Any) -> None:
        """Note that a replica serves no more.

        Raises what ended it where none of its model is there or comes back, and ControlLost where nobody can say that.
        """
        model, replicas = next((model, its) for model, its in self._models.items() if call in its.calls)
        member = replicas.calls[call]
        replica = replicas.group.select([member])
        failure: Exception = RunFailed(f"{replica.reports[0]} stopped serving by itself")
        try:
            gather([replica.as_pending("serving", [call])], REASON_TIMEOUT_S)
        except (ConfigError, RunFailed) as error:
            failure = error
        self._lose(model, member, failure)

    def _lose(self, model: str, member: int, failure: Exception) -> None:
        if isinstance(failure, ConfigError):
            raise failure
        replicas = self._models[model]
        if isinstance(failure, WorkerHung):
            replicas.group.end(member)
        replicas.calls = {call: its for call, its in replicas.calls.items() if its != member}
        then = replicas.restarts.lose(member, failure)
        others = len(self.fleet.members(model, *PRESENT))
        goes_on = f"{others} others of {model} go on" if others else f"what {model} is to score waits for it"
        log.warning("%s; %s; %s", failure, goes_on, then, extra={"kind": "death"})
        self._expect(model, member, replicas.of.start_timeout_s)

    def poll(self) -> list[ExpectedReplica]:
        """Take back replicas that were started again, and end those that hang; to be called every second or so.

        Returns what clients are to wait for that was not returned before. Raises as :meth:`lose`.
        """
        for model, replicas in self._models.items():
            for member, worker in replicas.restarts.take().items():
                self._take_in_restarted(model, member, worker)
            self._end_hanging(model, replicas)
        expected, self._expected = self._expected, []
        return expected

    def _take_in_restarted(self, model: str, member: int, worker: Group) -> None:
        """Have a new replica answer; clients shake hands with it by themselves."""
        replicas = self._models[model]
        old = replicas.group.reports[member]
        replicas.group = replicas.group.replace_worker(member, worker)
        replicas.heartbeat.replace(member, replicas.group)
        replicas.calls[worker.submit("serve", activity="serving").refs[0]] = member
        self.fleet.change(model, member, HealthEvent.READY)
        if replicas.of.addresses[member] != replicas.names[member]:
            self._expect(model, member, replicas.of.request_timeout_s)
        log.info(return_text(worker.reports[0], old), extra={"kind": "restart"})

    def _end_hanging(self, model: str, replicas: _Replicas) -> None:
        limit, working = replicas.of.request_timeout_s, self.fleet.members(model, *WORKING)
        hanging = replicas.heartbeat.find_hanging(working)
        silent = {member for member in working if replicas.heartbeat.silent_s(member) > limit / 2}
        for member in silent.symmetric_difference(self.fleet.members(model, Health.SUSPECT)):
            self.fleet.change(model, member, HealthEvent.SILENT if member in silent else HealthEvent.ANSWERED)
            self._expect(model, member, limit if member in silent else 0.0)
        for member in hanging:
            section = model.partition(":")[0]
            text = f"{replicas.group.reports[member]} has done nothing for {limit:g} s ({section}.request_timeout_s)"
            self._lose(model, member, WorkerHung(text))

    def _expect(self, model: str, member: int, within_s: float) -> None:
        its, suspect = self._models[model], self.fleet.health(model, member) is Health.SUSPECT
        self._expected.append(ExpectedReplica(model, its.names[member], within_s, its.of.addresses[member], suspect))

    def absent_replicas(self) -> list[ExpectedReplica]:
        """Return the replicas that are being started now, have moved, or are suspect; for clients that begin."""
        return [
            ExpectedReplica(model, name, its.of.start_timeout_s, address, health is Health.SUSPECT)
            for model, its in self._models.items()
            for member, (name, address) in enumerate(zip(its.names, its.of.addresses, strict=True))
            if (health := self.fleet.health(model, member)) is not Health.HEALTHY or name != address
        ]
