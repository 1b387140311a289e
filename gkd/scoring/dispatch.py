"""The client's thread: hands requests to the replicas, and to others when one does not answer."""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import zmq

from gkd.cluster.workers.deadline import LONGEST_TURN_S
from gkd.config.groups import scorer_group
from gkd.errors import ConfigError, RunFailed, describe_error
from gkd.inference.requests import (
    SAMPLE_CODES,
    GenerateRequest,
    RateRequest,
    RequestRejected,
    ScoreRequest,
    ScorerRejected,
    ScorerUnavailable,
)
from gkd.scoring import wire
from gkd.scoring.address import Key
from gkd.scoring.attempts import NO_ANSWER, NO_HANDSHAKE, RESTARTED
from gkd.scoring.replica import BUSY_S, PendingRequest, Replica
from gkd.scoring.wakeup import Wakeup
from gkd.types import Array

TICK_MS = 50
GONE = {"stopping": "is stopping", "not_greeted": "had lost the connection"}
PATIENCE = 10
"""Times ``request_timeout_s`` that one request may take, also while its replica gets on: it is lost then."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Waiting times and attempts of the client of ``scorer``; see config.Teacher."""

    request_timeout_s: float
    max_attempts: int
    heartbeat_s: float
    scorer: str = "teacher"

    @property
    def longest_s(self) -> float:
        """Time that one replica has for one request."""
        return PATIENCE * self.request_timeout_s

    @property
    def section(self) -> str:
        """The section of settings that these are of."""
        return scorer_group(self.scorer)


class Dispatcher:
    """Owns the sockets; base of :class:`gkd.scoring.client.ScoringClient`, which knows what fits the student.

    Every future handed to :meth:`hand_in` ends: with an answer, or with ScorerRejected, ScorerUnavailable,
    ConfigError (a replica does not fit) or RunFailed (the thread died, or the client was closed).
    """

    def __init__(
        self,
        addresses: Sequence[str],
        key: Key,
        retry_policy: RetryPolicy,
        n_clients: int,
        largest_reply: int,
    ) -> None:
        self._retry_policy = retry_policy
        self.replicas = [
            Replica(address, key, retry_policy.heartbeat_s, n_clients, largest_reply, retry_policy.scorer)
            for address in addresses
        ]
        self.welcomes: dict[str, Future[wire.Welcome]] = {address: Future() for address in addresses}
        self.counts: Counter[str] = Counter()
        """How many requests were "retried", answers came "late" and were dropped, and replicas were "lost"."""
        self.on_change: Callable[[str, bool], None] = lambda text, is_back: None
        """Is given a line, on this client's thread, when a replica that was in is out (False), or in again (True)."""
        self._lost: dict[str, str] = {}  # by names of those that are out, why, as last stated
        self._inbox: deque[PendingRequest] = deque()
        self._pending: dict[int, PendingRequest] = {}
        self._waiting: list[PendingRequest] = []  # a heap
        self._end: Exception | None = None
        self._looked = time.monotonic()
        self._lock, self._wakeup, self._closing = threading.Lock(), Wakeup(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="scoring-client", daemon=True)
        self._thread.start()

    def hand_in(self, pending: PendingRequest) -> None:
        """Take a request on; its future ends in any case. From any thread."""
        pending.future.set_running_or_notify_cancel()
        with self._lock:
            if self._end is None:
                self._inbox.append(pending)
                self._wakeup.set()
                return
        pending.future.set_exception(self._end)

    def expect(self, name: str, within_s: float, address: str, suspect: bool = False) -> None:
        """Have requests wait, where no replica is there, for the one that comes back ``within_s``, at ``address``.

        ``name``: its address at first. ``suspect``: others are preferred to it, up to the next call. From any thread.
        """
        for replica in self.replicas:
            if replica.name == name:
                replica.expected_until = time.monotonic() + within_s
                replica.address = address
                replica.suspect = suspect

    def close(self) -> None:
        """End the thread and its connections; requests under way fail with RunFailed."""
        self._closing.set()
        with self._lock:
            if self._end is None:
                self._wakeup.set()
        self._thread.join(5)

    def _check(self, address: str, welcome: wire.Welcome) -> None:
        """Raise ConfigError when the model at ``address`` does not fit the student."""
        raise NotImplementedError

    def _run(self) -> None:
        end: Exception = RunFailed(f"the {self._retry_policy.scorer}'s client was closed")
        try:
            while not self._closing.is_set():
                self._work()
        except ConfigError as error:
            end = error
        except Exception as error:
            end = RunFailed(f"the {self._retry_policy.scorer}'s client failed: {describe_error(error)}")
            end.__cause__ = error
        finally:
            with self._lock:
                self._end = end
            left = [*self._pending.values(), *self._inbox]
            for future in [*(pending.future for pending in left), *self.welcomes.values()]:
                if not future.done():
                    future.set_exception(end)
            for replica in self.replicas:
                replica.close()
            self._wakeup.close()

    def _work(self) -> None:
        self._poll()
        while self._inbox:
            pending = self._inbox.popleft()
            self._pending[pending.id] = pending
            heapq.heappush(self._waiting, pending)
        # All that has arrived comes first: this thread may have been kept from running for longer than any deadline.
        for replica in self.replicas:
            self._receive(replica)
        now = time.monotonic()
        if now - self._looked > LONGEST_TURN_S:  # what they did meanwhile is not known
            for replica in self.replicas:
                replica.progressed = now
        self._looked = now
        for replica in self.replicas:
            if reason := replica.beat(now):
                self._lose(replica, reason)
            elif replica.fault == NO_HANDSHAKE and self._lost.get(replica.name, NO_HANDSHAKE) != NO_HANDSHAKE:
                self._note_loss(replica, replica.fault)
            self._expire(replica, now)
        self._move_from_suspects()
        self._give_up(now)
        self._send_waiting(now)

    def _poll(self) -> None:
        poller = zmq.Poller()  # sockets change; making one is cheap
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        for replica in self.replicas:
            poller.register(replica.socket, zmq.POLLIN)
        poller.poll(TICK_MS)
        self._wakeup.clear()

    def _receive(self, replica: Replica) -> None:
        try:
            for frame in replica.receive():
                socket = replica.socket
                for message in wire.unpack(frame):
                    self._handle(replica, message)
                    if replica.socket is not socket:  # it was put out, and what else it sent is void
                        break
        except wire.WireError as error:
            self._lose(replica, f"sent what cannot be read ({error})")

    def _handle(self, replica: Replica, frame: bytes) -> None:
        body, arrays = wire.decode(frame)
        match body:
            case wire.Welcome():
                self._check(replica.address, body)
                replica.accept_welcome(body)
                if self._lost.pop(replica.name, None) is not None:
                    self.on_change(f"the {self._retry_policy.scorer} at {replica.address} answers again", True)
                if not self.welcomes[replica.name].done():
                    self.welcomes[replica.name].set_result(body)
            case wire.Pong() if replica.welcome and body.session != replica.welcome.session:
                self._lose(replica, RESTARTED if body.session else GONE["not_greeted"])
            case wire.Pong():
                replica.note_steps(body.steps)
            case wire.ScoreReply() | wire.GenerateReply() | wire.RateReply():
                self._accept_answer(replica, body, arrays)
            case wire.Error():
                self._accept_error(replica, body)

    def _accept_answer(
        self, replica: Replica, body: wire.ScoreReply | wire.GenerateReply | wire.RateReply, arrays: list[Array]
    ) -> None:
        pending = self._pending.get(body.id)
        if pending is None:
            self.counts["late"] += 1
            replica.abandoned.pop(body.id, None)
            return
        answer: Any
        if isinstance(body, wire.ScoreReply) and isinstance(pending.request, ScoreRequest):
            answer = wire.decode_target(body, arrays)
            shape = (pending.request.n_positions, replica.limits.width(pending.request))
            if answer.ids.shape != shape:
                raise wire.WireError(f"scores of shape {answer.ids.shape} where {shape} were requested")
            if answer.tail_logprobs is None and 0 < shape[1] < replica.limits.rows(pending.request):
                raise wire.WireError(f"scores of the top {shape[1]} without their tail")
        elif isinstance(body, wire.GenerateReply) and isinstance(pending.request, GenerateRequest):
            answer = arrays[0]
        elif isinstance(body, wire.RateReply) and isinstance(pending.request, RateRequest):
            answer = body.value
        else:
            raise wire.WireError(f"{type(body).__name__} as an answer to {type(pending.request).__name__}")
        self._finish(pending)
        replica.abandoned.clear()  # it works, so what it has not answered was lost on the way
        replica.progressed = time.monotonic()
        pending.future.set_result(answer)

    def _accept_error(self, replica: Replica, body: wire.Error) -> None:
        if body.id is None:
            raise wire.WireError(f"it could not read a request: {body.message}")
        pending = self._pending.get(body.id)
        if pending is not None and body.code in SAMPLE_CODES:
            self._finish(pending)
            replica.progressed = time.monotonic()
            pending.future.set_exception(ScorerRejected(body.code, body.message, self._retry_policy.scorer))
        elif body.code in GONE:
            self._lose(replica, GONE[body.code])
        elif body.code == "busy" and body.id in replica.outstanding and pending is not None:
            # Nothing is wrong with either; it is sent again, and this was no attempt.
            del replica.outstanding[body.id]
            self.counts["busy"] += 1
            replica.busy_until = time.monotonic() + BUSY_S
            pending.attempts -= 1
            heapq.heappush(self._waiting, pending)
        elif replica.outstanding.pop(body.id, None) is not None and pending is not None:
            self._try_again(pending, f"{body.code}: {body.message}")
        replica.abandoned.pop(body.id, None)

    def _finish(self, pending: PendingRequest) -> None:
        """Forget a request that has ended, wherever it is."""
        del self._pending[pending.id]
        with_replicas = [replica.outstanding.pop(pending.id, None) for replica in self.replicas]
        if not any(with_replicas) and pending in self._waiting:  # answered late, before it was sent again
            self._waiting.remove(pending)
            heapq.heapify(self._waiting)

    def _lose(self, replica: Replica, reason: str) -> None:
        """Put a replica out; its requests go to the others at once."""
        requests = list(replica.outstanding.values())
        if replica.welcome is not None:
            self.counts["lost"] += 1
            self._note_loss(replica, reason)
        replica.reset(time.monotonic(), reason)
        for pending in requests:
            self._try_again(pending, reason)

    def _note_loss(self, replica: Replica, reason: str) -> None:
        self._lost[replica.name] = reason
        policy, others = self._retry_policy, sum(r.welcome is not None for r in self.replicas if r is not replica)
        waiting = f"requests wait {policy.request_timeout_s:g} s for it ({policy.section}.request_timeout_s)"
        then = f"its requests go to {others} other{'s' * (others > 1)}" if others else waiting
        self.on_change(f"the {policy.scorer} at {replica.address} {reason}; {then}", False)

    def _expire(self, replica: Replica, now: float) -> None:
        """Give up what a replica has had for too long while it got on with nothing: what waits there waits its turn."""
        limit, longest = self._retry_policy.request_timeout_s, self._retry_policy.longest_s
        is_idle = now - replica.progressed >= limit
        for pending in list(replica.outstanding.values()):
            if now - pending.sent < (limit if is_idle else longest):
                continue
            del replica.outstanding[pending.id]
            replica.abandoned[pending.id] = pending.sent
            self._try_again(pending, "no answer")
        replica.abandoned = {id: sent for id, sent in replica.abandoned.items() if now - sent < longest}

    def _move_from_suspects(self) -> None:
        """Have others do what suspect replicas were sent, where there are others; the first answer counts.

        Once for each request, and beside its attempts: one that all replicas are slow with is not passed on and on.
        """
        if not self._answering or self._answering[0].suspect:
            return
        for replica in [replica for replica in self.replicas if replica.suspect]:
            for pending in [request for request in replica.outstanding.values() if not request.moved]:
                del replica.outstanding[pending.id]
                replica.abandoned[pending.id] = pending.sent
                pending.moved, pending.attempts = True, pending.attempts - 1
                self._try_again(pending, "does nothing")

    def _try_again(self, pending: PendingRequest, reason: str) -> None:
        assert pending.replica is not None, "a request that was never sent cannot fail"
        pending.history.append(f"{pending.replica.address} {reason} ({time.monotonic() - pending.sent:.1f} s)")
        if pending.attempts < self._retry_policy.max_attempts:
            self.counts["retried"] += 1
            heapq.heappush(self._waiting, pending)
        else:
            self._fail(pending, f"{pending.attempts} attempts ({self._retry_policy.section}.max_attempts)")

    def _fail(self, pending: PendingRequest, why: str) -> None:
        self._finish(pending)
        waited = time.monotonic() - pending.submitted
        history = "; ".join(pending.history) or "never sent"
        scorer = self._retry_policy.scorer
        pending.future.set_exception(
            ScorerUnavailable(f"no answer from the {scorer} after {waited:.1f} s, {why}: {history}")
        )

    def _give_up(self, now: float) -> None:
        """Fail what waits when there is nobody to send it to, or when nobody gets on for too long."""
        limit = self._retry_policy.request_timeout_s
        if all(replica.welcome is None for replica in self.replicas):
            out = ", ".join(f"{r.address} {r.fault or NO_ANSWER}, for {now - r.out_since:.1f} s" for r in self.replicas)
            # What is expected back has its own time, and after that as much as one that went out then.
            since = max(max(replica.out_since, replica.expected_until) for replica in self.replicas)
            stale = [c for c in self._waiting if now - max(since, c.submitted) > limit]
            why = f"all replicas are out ({out})"
        else:
            limit *= self._retry_policy.max_attempts
            progressed = max(replica.progressed for replica in self.replicas)
            stale = [c for c in self._waiting if now - max(progressed, c.submitted) > limit]
            why = f"nothing has been done for {now - progressed:.1f} s"
        if stale:
            ended = set(map(id, stale))
            self._waiting = [pending for pending in self._waiting if id(pending) not in ended]
            heapq.heapify(self._waiting)
        for pending in stale:
            self._fail(pending, why)

    def _send_waiting(self, now: float) -> None:
        unsent: list[PendingRequest] = []
        by_replica: dict[Replica, list[tuple[PendingRequest, bytes]]] = {}
        while self._waiting and any(replica.has_room for replica in self.replicas):
            pending = heapq.heappop(self._waiting)
            if (replica := self._replica_for(pending)) is None:
                unsent.append(pending)
            elif (frame := self._frame_for(pending, replica)) is not None:
                replica.outstanding[pending.id] = pending
                by_replica.setdefault(replica, []).append((pending, frame))
        for replica, requests in by_replica.items():
            unsent += self._send(replica, requests, now)
        for pending in unsent:
            heapq.heappush(self._waiting, pending)

    @property
    def _answering(self) -> list[Replica]:
        """The replicas that answer, without the suspect ones unless all are."""
        answering = [replica for replica in self.replicas if replica.welcome is not None]
        return [replica for replica in answering if not replica.suspect] or answering

    def _replica_for(self, pending: PendingRequest) -> Replica | None:
        """Return the least busy replica, another than the last time if there is one; None where none has room."""
        others = [replica for replica in self._answering if replica is not pending.replica] or self._answering
        free = [replica for replica in others if replica.has_room]
        return min(free, key=lambda r: r.load) if free else None

    def _frame_for(self, pending: PendingRequest, replica: Replica) -> bytes | None:
        """Return the message of a request; None where no server takes it, which it then fails with."""
        frame = wire.encode_request(pending.id, self._retry_policy.longest_s, pending.request)
        try:
            replica.check(pending.request, len(frame))
        except RequestRejected as rejected:
            del self._pending[pending.id]
            pending.future.set_exception(ScorerRejected(rejected.code, rejected.message, self._retry_policy.scorer))
            return None
        return frame

    def _send(
        self, replica: Replica, requests: Sequence[tuple[PendingRequest, bytes]], now: float
    ) -> list[PendingRequest]:
        """Send what goes to one replica, as few messages as it takes; returns the requests that cannot be sent now."""
        left = deque(pending for pending, _ in requests)
        for frames in replica.pack([frame for _, frame in requests]):
            if not replica.send(wire.pack(frames)):
                break
            for pending in [left.popleft() for _ in frames]:
                pending.attempts, pending.sent, pending.replica = pending.attempts + 1, now, replica
        for pending in left:
            del replica.outstanding[pending.id]
        return list(left)
