"""Whose request the engine takes next, and what a server holds for each of its clients, in bytes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gkd.errors import RunFailed
from gkd.inference.requests import Limits, Request, RequestRejected, ScoreRequest
from gkd.scoring.connections import MIB, ClientLimits, Connection

MAX_QUEUED = 16_384  # requests of one client
CHATTER_BYTES = MIB  # answers to greetings and heartbeats, and rejections, that one client may leave unread


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request in the queue: whose it is, under which id, and until when (``time.monotonic``) the answer is of use.

    ``request_bytes`` and ``answer_bytes``: memory that the one takes and the other is going to.
    """

    client: bytes
    id: int
    deadline: float
    request: Request
    request_bytes: int
    answer_bytes: int

    @staticmethod
    def from_request(
        client: bytes, id: int, deadline: float, request: Request, request_bytes: int, limits: Limits
    ) -> QueuedRequest:
        """Queue ``request`` for an engine with ``limits``."""
        rows, width = 0, 0
        if isinstance(request, ScoreRequest):
            rows, width = request.n_positions, limits.width(request)
        return QueuedRequest(client, id, deadline, request, request_bytes + 1024, 1024 + rows * (8 + 8 * width))


@dataclass(slots=True, eq=False)
class _ClientQueue:
    """``owed``: bytes of the answers that the engine works on; ``handed``: of all messages handed to ZeroMQ for it."""

    connection: Connection
    queue: deque[QueuedRequest] = field(default_factory=deque)
    queued: int = 0
    owed: int = 0
    handed: int = 0
    acked: int = 0
    chatter: int = 0
    greeted: bool = False
    moved: float = field(default_factory=time.monotonic)

    @property
    def unread_bytes(self) -> int:
        """Bytes handed to ZeroMQ that the client has not taken off the network, as last measured."""
        return max(0, self.handed - self.acked)

    def measure(self, now: float) -> None:
        """Measure how far the client has read."""
        acked = self.connection.acked_bytes
        if acked is None:
            acked = self.handed
        if acked >= self.handed:  # its own protocol adds a little
            self.handed, self.chatter = acked, 0
        if acked > self.acked or acked >= self.handed:
            self.acked, self.moved = acked, now


class Clients:
    """Every client's queue, one after the other. The engine's thread takes, the socket's thread does everything else.

    ``expired`` is called with jobs whose time is over, from within :meth:`take`.
    """

    def __init__(self, client_limits: ClientLimits, expired: Callable[[QueuedRequest], None]) -> None:
        self._limits, self._expired = client_limits, expired
        self._clients: dict[bytes, _ClientQueue] = {}
        self._order: deque[bytes] = deque()  # clients with requests
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    def add(self, id: bytes, connection: Connection) -> None:
        """Take a client on, if it is new."""
        with self._changed:
            if id not in self._clients:
                self._clients[id] = _ClientQueue(connection)

    def note_greeting(self, id: bytes) -> None:
        """Note that a client has been greeted."""
        with self._changed:
            self._clients[id].greeted = True

    def has_greeted(self, id: bytes) -> bool:
        """Return whether a client was greeted, and has not gone since."""
        with self._changed:
            return self._clients[id].greeted

    def forget(self, id: bytes) -> None:
        """Forget a client that has gone: nobody waits for its answers any more."""
        with self._changed:
            self._clients.pop(id, None)
            if id in self._order:
                self._order.remove(id)

    def fail(self, error: BaseException) -> None:
        """Have :meth:`take` raise RunFailed from now on."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def put(self, job: QueuedRequest) -> None:
        """Queue a request. Raises RequestRejected ("busy") where the client has too much in the queue already."""
        client_limits = self._limits
        with self._changed:
            client = self._clients[job.client]
            queued = client.queued + job.request_bytes
            crowded = (
                sum(c.queued for c in self._clients.values()) + job.request_bytes > client_limits.queued_bytes_in_all
            )
            most = min(
                client_limits.queued_bytes,
                client_limits.queued_bytes_in_all // len(self._clients) if crowded else queued,
            )
            if client.queue and (queued > most or len(client.queue) >= MAX_QUEUED):
                raise RequestRejected("busy", f"{len(client.queue)} of this client's requests are waiting already")
            if not client.queue:
                self._order.append(job.client)
            client.queue.append(job)
            client.queued = queued
            self._changed.notify_all()

    def take(self, room: int, timeout_s: float) -> list[QueuedRequest]:
        """Take up to ``room`` jobs, one of each client in turn; waits ``timeout_s`` for the first.

        Clients that do not read their answers are passed over. Raises RunFailed after :meth:`fail`.
        """
        end = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._failure is not None:
                    raise RunFailed(f"the scorer's socket thread died: {self._failure!r}") from self._failure
                jobs = self._take(room)
                left = end - time.monotonic()
                if jobs or room <= 0 or left <= 0:
                    return jobs
                self._changed.wait(left)

    def _take(self, room: int) -> list[QueuedRequest]:
        jobs: list[QueuedRequest] = []
        passed, now = 0, time.monotonic()
        in_all = sum(client.owed + client.unread_bytes for client in self._clients.values())
        while len(jobs) < room and passed < len(self._order):
            id = self._order.popleft()
            client = self._clients[id]
            job = client.queue[0]
            held = client.owed + client.unread_bytes
            full = held + job.answer_bytes > self._limits.unread_bytes
            crowded = in_all + job.answer_bytes > self._limits.unread_bytes_in_all
            if job.deadline > now and held > 0 and (full or crowded):
                self._order.append(id)
                passed += 1
                continue
            client.queue.popleft()
            client.queued -= job.request_bytes
            if client.queue:
                self._order.append(id)
            if job.deadline <= now:
                self._expired(job)
                continue
            client.owed += job.answer_bytes
            in_all += job.answer_bytes
            jobs.append(job)
            passed = 0
        return jobs

    def count_out(self, id: bytes, size: int, job: QueuedRequest | None) -> bool:
        """Note that a message of ``size`` bytes goes out, the answer to ``job`` where there is one; False: there is no
        client.
        """
        with self._changed:
            client = self._clients.get(id)
            if client is None:
                return False
            client.handed += size
            if job is None:
                client.chatter += size
            else:
                client.owed -= job.answer_bytes
            return True

    def measure(self, now: float) -> Iterator[tuple[Connection, str]]:
        """Measure how much each client has read; yields connections of those that do not read, and the reason."""
        with self._changed:
            clients = list(self._clients.values())
            for client in clients:
                client.measure(now)
            self._changed.notify_all()
        for client in clients:
            if (client.unread_bytes and now - client.moved > self._limits.unread_s) or client.chatter > CHATTER_BYTES:
                yield client.connection, "unread"

    def drain(self) -> list[QueuedRequest]:
        """Take out everything."""
        with self._changed:
            jobs = [job for client in self._clients.values() for job in client.queue]
            for client in self._clients.values():
                client.queue.clear()
                client.queued = 0
            self._order.clear()
            return jobs
