"""The client's thread: hands requests to the replicas, and to others when one does not answer."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import zmq

from gkd.errors import ConfigError, RunFailed
from gkd.inference.requests import SAMPLE_CODES, Generate, Rate, Refused, Score, ScorerRefused, ScorerUnavailable
from gkd.scoring import wire
from gkd.scoring.address import Key
from gkd.scoring.replica import BUSY_S, Call, Replica
from gkd.scoring.wakeup import Wakeup

TICK_MS = 50


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the client of ``scorer`` waits; see config.Teacher."""

    request_timeout_s: float
    max_attempts: int
    heartbeat_s: float
    scorer: str = "teacher"

    @property
    def section(self) -> str:
        """The section of settings that these are of."""
        return self.scorer.partition(":")[0]


class Dispatcher:
    """Owns the sockets. ``check`` raises ConfigError for a welcome that does not fit the student.

    Every future handed to :meth:`submit` ends: with an answer, or with ScorerRefused, ScorerUnavailable,
    ConfigError (a replica does not fit) or RunFailed (the thread died, or the client was closed).
    """

    def __init__(
        self,
        addresses: Sequence[str],
        key: Key,
        patience: Patience,
        n_clients: int,
        largest_reply: int,
        check: Callable[[str, wire.Welcome], None],
    ) -> None:
        self._patience, self._check = patience, check
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.replicas = [
            Replica(address, self._context, key, patience.heartbeat_s, n_clients, largest_reply, patience.scorer)
            for address in addresses
        ]
        self.welcomes: dict[str, Future[wire.Welcome]] = {address: Future() for address in addresses}
        self.counts: Counter[str] = Counter()
        self._inbox: deque[Call] = deque()
        self._calls: dict[int, Call] = {}
        self._waiting: deque[Call] = deque()
        self._progress = time.monotonic()
        self._end: Exception | None = None
        self._lock, self._wakeup, self._closing = threading.Lock(), Wakeup(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="scoring-client", daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> None:
        """Take a call on; its future ends in any case. From any thread."""
        call.future.set_running_or_notify_cancel()
        with self._lock:
            if self._end is None:
                self._inbox.append(call)
                self._wakeup.set()
                return
        call.future.set_exception(self._end)

    def expect(self, name: str, within_s: float, address: str) -> None:
        """Wait for the replica ``name``, which is away, at least ``within_s`` from now, at ``address``.

        From any thread.
        """
        for replica in self.replicas:
            if replica.name == name:
                replica.expected_until = time.monotonic() + within_s
                replica.address = address

    def close(self) -> None:
        """End the thread; what is under way fails."""
        self._closing.set()
        with self._lock:
            if self._end is None:
                self._wakeup.set()
        self._thread.join(5)

    def _run(self) -> None:
        end: Exception = RunFailed(f"the {self._patience.scorer}'s client was closed")
        try:
            while not self._closing.is_set():
                self._work()
        except ConfigError as error:
            end = error
        except Exception as error:
            end = RunFailed(f"the {self._patience.scorer}'s client failed: {type(error).__name__}: {error}")
            end.__cause__ = error
        finally:
            with self._lock:
                self._end = end
            left = [*self._calls.values(), *self._inbox]
            for future in [*(call.future for call in left), *self.welcomes.values()]:
                if not future.done():
                    future.set_exception(end)
            self._context.destroy(linger=0)
            self._wakeup.close()

    def _work(self) -> None:
        self._poll()
        while self._inbox:
            call = self._inbox.popleft()
            self._calls[call.id] = call
            self._waiting.append(call)
        # All that has arrived comes first: this thread may have been kept from running for longer than any deadline.
        for replica in self.replicas:
            self._receive(replica)
        now = time.monotonic()
        for replica in self.replicas:
            if not replica.beat(now):
                self._lose(replica, "stopped answering")
            self._expire(replica, now)
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
                self._progress = time.monotonic()  # what waited for it has its time from now on
                if not self.welcomes[replica.name].done():
                    self.welcomes[replica.name].set_result(body)
            case wire.Pong() if replica.welcome and body.session != replica.welcome.session:
                self._lose(replica, "was restarted")
            case wire.Scored() | wire.Generated() | wire.Rated():
                self._accept_answer(replica, body, arrays)
            case wire.Error():
                self._accept_error(replica, body)

    def _accept_answer(
        self, replica: Replica, body: wire.Scored | wire.Generated | wire.Rated, arrays: list[wire.Array]
    ) -> None:
        call = self._calls.get(body.id)
        if call is None:
            self.counts["late"] += 1
            replica.abandoned.discard(body.id)
            return
        answer: Any
        if isinstance(body, wire.Scored) and isinstance(call.request, Score):
            answer = wire.decode_target(body, arrays)
            shape = (call.request.n_positions, replica.limits.width(call.request))
            if answer.ids.shape != shape:
                raise wire.WireError(f"scores of shape {answer.ids.shape} where {shape} were requested")
            if answer.tail_logprobs is None and 0 < shape[1] < replica.limits.rows(call.request):
                raise wire.WireError(f"scores of the top {shape[1]} without their tail")
        elif isinstance(body, wire.Generated) and isinstance(call.request, Generate):
            answer = arrays[0]
        elif isinstance(body, wire.Rated) and isinstance(call.request, Rate):
            answer = body.value
        else:
            raise wire.WireError(f"{type(body).__name__} as an answer to {type(call.request).__name__}")
        self._finish(call)
        replica.abandoned.clear()  # it works, so what it has not answered was lost on the way
        self._progress = time.monotonic()
        call.future.set_result(answer)

    def _accept_error(self, replica: Replica, body: wire.Error) -> None:
        if body.id is None:
            raise wire.WireError(f"it could not read a request: {body.message}")
        call = self._calls.get(body.id)
        if call is not None and body.code in SAMPLE_CODES:
            self._finish(call)
            self._progress = time.monotonic()
            call.future.set_exception(ScorerRefused(body.code, body.message, self._patience.scorer))
        elif body.code == "stopping":
            self._lose(replica, "is stopping")
        elif body.code == "busy" and body.id in replica.outstanding and call is not None:
            # Nothing is wrong with either; it is sent again, and this was no attempt.
            del replica.outstanding[body.id]
            self.counts["busy"] += 1
            replica.busy_until = time.monotonic() + BUSY_S
            call.attempts -= 1
            self._waiting.appendleft(call)
        elif replica.outstanding.pop(body.id, None) is not None and call is not None:
            self._try_again(call, f"{body.code}: {body.message}")
        replica.abandoned.discard(body.id)

    def _finish(self, call: Call) -> None:
        """Forget a call that has ended, wherever it is."""
        del self._calls[call.id]
        for replica in self.replicas:
            replica.outstanding.pop(call.id, None)
        if call in self._waiting:  # answered late, before it was sent again
            self._waiting.remove(call)

    def _lose(self, replica: Replica, reason: str) -> None:
        """Put a replica out; its requests go to the others at once."""
        calls = list(replica.outstanding.values())
        self.counts["lost"] += replica.welcome is not None
        replica.reset(time.monotonic())
        for call in reversed(calls):
            self._try_again(call, reason)

    def _expire(self, replica: Replica, now: float) -> None:
        for call in [c for c in replica.outstanding.values() if c.deadline <= now]:
            del replica.outstanding[call.id]
            replica.abandoned.add(call.id)
            self._try_again(call, "no answer")

    def _try_again(self, call: Call, reason: str) -> None:
        assert call.replica is not None, "a call that was never sent cannot fail"
        call.history.append(f"{call.replica.address} {reason} ({time.monotonic() - call.sent:.1f} s)")
        if call.attempts < self._patience.max_attempts:
            self.counts["retried"] += 1
            self._waiting.appendleft(call)
        else:
            self._fail(call, f"{call.attempts} attempts ({self._patience.section}.max_attempts)")

    def _fail(self, call: Call, why: str) -> None:
        self._finish(call)
        waited = time.monotonic() - call.submitted
        history = "; ".join(call.history) or "never sent"
        scorer = self._patience.scorer
        call.future.set_exception(
            ScorerUnavailable(f"no answer from the {scorer} after {waited:.1f} s, {why}: {history}")
        )

    def _give_up(self, now: float) -> None:
        """Fail what waits when there is nobody to send it to, or when nothing has been answered for too long."""
        limit = self._patience.request_timeout_s
        if all(replica.welcome is None for replica in self.replicas):
            out = ", ".join(f"{r.address} out for {now - r.out_since:.1f} s" for r in self.replicas)
            # What is expected back has its own time, and after that as much as one that went out then.
            since = max(max(replica.out_since, replica.expected_until) for replica in self.replicas)
            stale = [c for c in self._waiting if now - max(since, c.submitted) > limit]
            why = f"all replicas are out ({out})"
        else:
            limit *= self._patience.max_attempts
            stale = [c for c in self._waiting if now - max(self._progress, c.submitted) > limit]
            why = f"nothing has been answered for {now - self._progress:.1f} s"
        for call in stale:
            self._fail(call, why)

    def _send_waiting(self, now: float) -> None:
        kept: list[Call] = []
        chosen: dict[Replica, list[tuple[Call, bytes]]] = {}
        while self._waiting and any(replica.has_room for replica in self.replicas):
            call = self._waiting.popleft()
            if (replica := self._replica_for(call)) is None:
                kept.append(call)
            elif (frame := self._frame_for(call, replica)) is not None:
                replica.outstanding[call.id] = call
                chosen.setdefault(replica, []).append((call, frame))
        for replica, calls in chosen.items():
            kept += self._send(replica, calls, now)
        self._waiting.extendleft(reversed(kept))

    def _replica_for(self, call: Call) -> Replica | None:
        """Return the least busy replica, another than the last time if there is one; None where none has room."""
        answering = [replica for replica in self.replicas if replica.welcome is not None]
        others = [replica for replica in answering if replica is not call.replica] or answering
        free = [replica for replica in others if replica.has_room]
        return min(free, key=lambda r: r.load) if free else None

    def _frame_for(self, call: Call, replica: Replica) -> bytes | None:
        """Return the message of a call; None where no server takes it, which the call then fails with."""
        frame = wire.encode_request(call.id, self._patience.request_timeout_s, call.request)
        try:
            replica.check(call.request, len(frame))
        except Refused as refused:
            del self._calls[call.id]
            call.future.set_exception(ScorerRefused(refused.code, refused.message, self._patience.scorer))
            return None
        return frame

    def _send(self, replica: Replica, calls: Sequence[tuple[Call, bytes]], now: float) -> list[Call]:
        """Send what goes to one replica, as few messages as it takes; returns the calls that cannot be sent now."""
        left = deque(call for call, _ in calls)
        for frames in replica.pack([frame for _, frame in calls]):
            if not replica.send(wire.pack(frames)):
                break
            for call in [left.popleft() for _ in frames]:
                call.attempts, call.sent, call.replica = call.attempts + 1, now, replica
                call.deadline = now + self._patience.request_timeout_s
        for call in left:
            del replica.outstanding[call.id]
        return list(left)
