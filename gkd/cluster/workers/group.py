"""A group of workers in rank order, and waiting for them so that the first failure is raised at once."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gkd.cluster.layout.assignment import Report
from gkd.cluster.session.control_service import ControlService
from gkd.cluster.workers.deadline import Deadline
from gkd.cluster.workers.failure import WorkerDied, WorkerHung, explain
from gkd.cluster.workers.worker import end_family
from gkd.errors import ControlLost, RunFailed

log = logging.getLogger("gkd")
KILL_S = 20.0
"""Time a node has to kill a process that hangs; Ray may have to start one of its own for it."""
DEATH_IS_KNOWN_S = 5.0
"""Ray reports a process that ended within this time."""
POLL_EVERY_S = 1.0
"""How often a wait looks whether Ray's control service is there."""
GET_S = 20.0
"""How often it looks while it gets a result, which may be large and would be begun anew."""


@dataclass(frozen=True)
class PendingCall:
    """Calls under way, one a worker, in rank order; :func:`gather` waits for them."""

    activity: str
    """Name of what is done, for messages: ``loading the teacher``."""
    workers: tuple[str, ...]
    """Names of the workers that do it, for messages, aligned with ``refs``."""
    refs: tuple[Any, ...]
    service: ControlService | None = None
    """Ray's control service, which the wait watches."""


@dataclass(frozen=True)
class Group:
    """Workers of one group (actor, rollout, teacher) in rank order, each a Ray handle of :class:`Worker`."""

    name: str
    workers: tuple[Any, ...]
    reports: tuple[Report, ...]
    """Place of each worker and what it saw, aligned with ``workers``."""
    service: ControlService | None = field(default=None, compare=False)
    """Ray's control service, which every wait for these workers watches."""

    def __len__(self) -> int:
        return len(self.workers)

    def select(self, ranks: Sequence[int]) -> Group:
        """Return the group of these workers alone, in this order."""
        workers, reports = tuple(self.workers[i] for i in ranks), tuple(self.reports[i] for i in ranks)
        return replace(self, workers=workers, reports=reports)

    def replace_worker(self, position: int, worker: Group) -> Group:
        """Return the group with the one worker of another group at ``position``."""
        workers, reports = list(self.workers), list(self.reports)
        workers[position], reports[position] = worker.workers[0], worker.reports[0]
        return replace(self, workers=tuple(workers), reports=tuple(reports))

    def submit(self, method: str, *args: Any, activity: str | None = None) -> PendingCall:
        """Start calling ``method`` of every worker's object with the same arguments; wait with :func:`gather`."""
        return self.submit_each(method, [args] * len(self), activity=activity)

    def submit_each(
        self, method: str, args_per_rank: Sequence[Sequence[Any]], *, activity: str | None = None
    ) -> PendingCall:
        """Start calling ``method`` of every worker's object, rank ``i`` with ``args_per_rank[i]``."""
        pairs = zip(self.workers, args_per_rank, strict=True)
        return self.as_pending(
            activity or _take_last_part(method), [worker.call.remote(method, *args) for worker, args in pairs]
        )

    def submit_build(
        self, target: str, args_per_rank: Sequence[Sequence[Any]], *, environment: Mapping[str, str] | None = None
    ) -> PendingCall:
        """Start building ``package.module:Class`` in every worker, rank ``i`` with ``args_per_rank[i]``.

        ``environment`` is set first. All groups are to be submitted before any is gathered, so that they start at the
        same time. Results are None.
        """
        refs = []
        for worker, args in zip(self.workers, args_per_rank, strict=True):
            if environment:
                worker.set_environment.remote(dict(environment))  # same thread, so done before the build
            refs.append(worker.build.remote(target, *args))
        return self.as_pending(f"starting {target.partition(':')[2]} (cluster.start_timeout_s)", refs)

    def call(self, method: str, *args: Any, timeout_s: float, activity: str | None = None) -> list[Any]:
        """Call ``method`` of every worker's object; results in rank order. Raises what :func:`gather` raises."""
        return gather([self.submit(method, *args, activity=activity)], timeout_s)[0]

    def control(
        self, method: str, *args: Any, timeout_s: float, activity: str | None = None, keep_deaths: bool = False
    ) -> list[Any]:
        """Do what :meth:`call` does on the workers' other threads: answered also while they are busy.

        ``keep_deaths`` as in :func:`gather`.
        """
        return gather([self.submit_control(method, *args, activity=activity)], timeout_s, keep_deaths=keep_deaths)[0]

    def submit_control(self, method: str, *args: Any, activity: str | None = None) -> PendingCall:
        """Start what :meth:`control` does; wait with :func:`gather`."""
        return self.as_pending(
            activity or _take_last_part(method), [worker.control.remote(method, *args) for worker in self.workers]
        )

    def stream(self, rank: int, method: str, *args: Any) -> Any:
        """Return Ray's generator of references to what a generator method of one worker's object yields.

        Errors come from ``ray.get`` of an item as Ray's own; :func:`gkd.cluster.workers.failure.explain` names them.
        """
        return self.workers[rank].stream.remote(method, *args)

    def end(self, rank: int) -> None:
        """End a worker that hangs, and its children, which may hold GPUs and wait for each other there.

        Ray asks a process to end, which one that is stopped does not do: it is killed. Without Ray's control service
        nothing can be asked for, and the call would wait for it: the worker is left to the end of the run.
        """
        if self.service is not None and self.service.is_lost:
            return
        report = self.reports[rank]
        on_node = NodeAffinitySchedulingStrategy(report.node_id, soft=False)
        killing = _kill.options(num_cpus=0, scheduling_strategy=on_node).remote(report.pid)
        ray.wait([killing], timeout=KILL_S)  # before Ray ends it: then nothing shows whose children they were
        ray.kill(self.workers[rank], no_restart=True)

    def as_pending(self, activity: str, refs: Sequence[Any]) -> PendingCall:
        """Return calls under way, one a worker; wait with :func:`gather`."""
        return PendingCall(f"{self.name}: {activity}", tuple(map(str, self.reports)), tuple(refs), self.service)


def kill_worker(pid: int) -> None:
    """Kill process ``pid`` of this node with its children, if it is a worker of Ray's and has not ended."""
    with suppress(OSError, psutil.NoSuchProcess):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
            end_family(pid)


_kill: Any = ray.remote(max_retries=0)(kill_worker)


def gather(
    calls: Sequence[PendingCall],
    timeout_s: float | Deadline,
    *,
    keep_deaths: bool = False,
    keep_late: bool = False,
    announce_s: float = math.inf,
) -> list[list[Any]]:
    """Wait for calls of any number of groups; results per call, in rank order.

    Raises RunFailed as soon as the first worker fails or dies, naming it, or after ``timeout_s`` seconds, naming what
    was awaited; a ConfigError or RunFailed from inside a worker comes out as it is. For groups in which others can do a
    worker's work, one that died has with ``keep_deaths`` its WorkerDied in place of a result, and one that has not
    answered in time with ``keep_late`` its WorkerHung. Raises ControlLost when the time that Ray leaves a run without
    its control service is over. A line states what is still awaited every ``announce_s`` seconds.
    """
    deadline = timeout_s if isinstance(timeout_s, Deadline) else Deadline(timeout_s)
    announcement = Deadline(announce_s)
    owner = owners(calls)
    services = {call.service for call in calls if call.service is not None}
    results: dict[Any, Any] = {}
    waiting = list(owner)
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=_seconds_to_next_poll(deadline.end))
        deadline.look()
        if not ready and not deadline.is_over():
            _require_time(services)
            if announcement.is_over():
                log.info(_describe_waiting(calls, set(waiting), owner))
                announcement = Deadline(announce_s)
            continue
        if not ready:
            if not keep_late:
                raise RunFailed(_timeout_text(calls, set(waiting), owner, deadline))
            results |= {ref: WorkerHung(_timeout_text(calls, {ref}, owner, deadline)) for ref in waiting}
            break
        for ref in ready:
            try:
                results[ref] = _get(ref, deadline.end, services)
            except ControlLost:
                raise
            except Exception as error:  # whatever it is, it is raised with the worker's name
                failure = explain(error, owner[ref])
                if not (keep_deaths and isinstance(failure, WorkerDied)):
                    raise failure from error
                results[ref] = failure
    return [[results[ref] for ref in call.refs] for call in calls]


def _get(ref: Any, deadline: float, services: Collection[ControlService]) -> Any:
    """Return the result of a call that is done. Ray asks its control service why a worker died: it may be gone."""
    deadline = max(deadline, time.monotonic() + POLL_EVERY_S)
    while True:
        try:
            return ray.get(ref, timeout=min(GET_S, max(0.0, deadline - time.monotonic())))
        except GetTimeoutError:
            if time.monotonic() >= deadline:
                raise
        for service in services:
            service.require()


def _require_time(services: Collection[ControlService]) -> None:
    for service in services:
        service.require_time()


def _seconds_to_next_poll(deadline: float) -> float:
    return min(POLL_EVERY_S, max(0.0, deadline - time.monotonic()))


def _take_last_part(method: str) -> str:
    """Return what a call is named after where no activity is given: ``update`` of ``trainer.update``."""
    return method.rpartition(".")[2]


def wait(call: PendingCall, timeout_s: float) -> None:
    """Wait until a call is done, without fetching what it returns: that may be handed on by reference.

    What went wrong, if anything did, is raised where the references are used. Raises RunFailed after ``timeout_s``, and
    ControlLost as :func:`gather` does.
    """
    deadline, late = Deadline(timeout_s), list(call.refs)
    while late:
        left = _seconds_to_next_poll(deadline.end)
        _, late = ray.wait(late, num_returns=len(late), timeout=left, fetch_local=False)
        if late and deadline.is_over():
            raise RunFailed(_timeout_text([call], set(late), owners([call]), deadline))
        if call.service is not None:
            call.service.require_time()


def owners(calls: Iterable[PendingCall]) -> dict[Any, str]:
    """Return whose each reference of calls is."""
    return {ref: worker for call in calls for ref, worker in zip(call.refs, call.workers, strict=True)}


def is_done(call: PendingCall, timeout_s: float = 0.0) -> bool:
    """Return whether every worker has answered, or failed, within ``timeout_s``."""
    return not ray.wait(list(call.refs), num_returns=len(call.refs), timeout=timeout_s, fetch_local=False)[1]


def is_any_done(call: PendingCall) -> bool:
    """Return whether any worker has answered, or failed."""
    return bool(ray.wait(list(call.refs), num_returns=1, timeout=0, fetch_local=False)[0])


def read_outcome(call: PendingCall) -> bool | None:
    """Return True once every worker has answered a call, False where any has failed at it, or died; None until then."""
    ready, missing = ray.wait(list(call.refs), num_returns=len(call.refs), timeout=0, fetch_local=False)
    try:
        ray.get(ready, timeout=GET_S)
    except GetTimeoutError:  # why a worker died is not known yet
        return None
    except Exception:  # which :func:`gather` raises, with the worker's name
        return False
    return None if missing else True


Attend = Callable[[Sequence[Any]], None]
"""Does what others need for a moment, or until one of these references of Ray's is there."""


def attend_until_done(call: PendingCall, timeout_s: float, attend: Attend) -> None:
    """Have ``attend`` called with what a call still waits for, again and again, until all is there or the time over.

    Or until a worker has failed, which the others may wait for.
    """
    deadline, late = time.monotonic() + timeout_s, list(call.refs)
    while late and time.monotonic() < deadline and read_outcome(call) is not False:
        attend(late)
        _, late = ray.wait(late, num_returns=len(late), timeout=0, fetch_local=False)


def gather_partners(calls: Sequence[PendingCall], timeout_s: float | Deadline) -> list[list[Any]]:
    """Wait for calls as :func:`gather` does, of workers that wait for each other.

    One that has lost its partner may report that before Ray has noticed the death which is behind it: raised is the
    death then, from which a run begins again.
    """
    try:
        return gather(calls, timeout_s)
    except RunFailed as failure:
        # One of a kind of its own, as where memory ran out, has a reason of its own.
        death = find_first_death(calls, DEATH_IS_KNOWN_S) if type(failure) is RunFailed else None
        if death is None:
            raise
        raise WorkerDied(f"{death}; {failure}") from None


def find_first_death(calls: Sequence[PendingCall], timeout_s: float) -> WorkerDied | None:
    """Return the first worker found dead among those of calls that have failed, or fail within ``timeout_s``."""
    owner = owners(calls)
    waiting, deadline = list(owner), time.monotonic() + timeout_s
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        try:
            ray.get(ready[0], timeout=1.0)
        except Exception as error:  # of which only a death is of interest here
            failure = explain(error, owner[ready[0]])
            if isinstance(failure, WorkerDied) and not isinstance(failure, WorkerHung):
                return failure
    return None


def _timeout_text(calls: Sequence[PendingCall], waiting: set[Any], owner: Mapping[Any, str], over: Deadline) -> str:
    return _describe_waiting(calls, waiting, owner, f"{over}, ")


def _describe_waiting(calls: Sequence[PendingCall], waiting: set[Any], owner: Mapping[Any, str], over: str = "") -> str:
    activity = "; ".join(dict.fromkeys(call.activity for call in calls if waiting & set(call.refs)))
    late = [owner[ref] for call in calls for ref in call.refs if ref in waiting]
    others = f" and {len(late) - 3} more" if len(late) > 3 else ""
    return f"{activity}: {over}still waiting for {', '.join(late[:3])}{others}"


def fetch(refs: Sequence[Any], timeout_s: float, activity: str) -> list[Any]:
    """Fetch the objects behind ``refs``. Raises RunFailed, naming ``activity``, when one is late or lost."""
    try:
        return list(ray.get(list(refs), timeout=timeout_s))
    except GetTimeoutError:
        raise RunFailed(f"{activity} did not arrive within {timeout_s:g} s") from None
    except RayError as error:
        raise explain(error, f"fetching {activity}") from error


class Stored(Protocol):
    """The entry at position ``slot`` of the list that the Ray object reference ``ref`` stands for."""

    @property
    def ref(self) -> Any: ...

    @property
    def slot(self) -> int: ...


def fetch_samples(places: Sequence[Stored], timeout_s: float) -> list[Any]:
    """Fetch the arrays of samples, in their order; each list that holds some is fetched once. Raises as fetch."""
    refs = list(dict.fromkeys(place.ref for place in places))
    lists = dict(zip(refs, fetch(refs, timeout_s, "sampled responses"), strict=True))
    return [lists[place.ref][place.slot] for place in places]
