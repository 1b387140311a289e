"""The server's side of the wire: a ROUTER socket with a thread of its own, and a queue towards the engine.

The thread answers handshakes and heartbeats at once, also while the engine is busy, and rejects at once what no engine
could answer. What the engine can do waits in the queue with the moment at which it expires.
Only peers with the key get as far as sending; what each of them may take up is bounded all the same (see ClientLimits).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from gkd.data.rendering import Rendering
from gkd.errors import ConfigError
from gkd.inference.requests import ErrorCode, Limits, RequestRejected
from gkd.scoring import wire
from gkd.scoring.address import Key, endpoint, has_only_ipv6, secure_server
from gkd.scoring.clients import Clients, QueuedRequest
from gkd.scoring.connections import MIB, ClientLimits, Connection, Connections
from gkd.scoring.wakeup import Wakeup
from gkd.scoring.zap import Authenticator

UNREAD_MESSAGES = 16  # of one client in ZeroMQ before it stops reading from the network
MESSAGES_AT_ONCE = 256
LINGER_MS = 500
TICK_S = 0.05
GRACE_S = 0.2
"""Time that clients have to read their last answers: what they have not read is lost when a connection ends."""


class Frontend:
    """Binds ``host:port`` (port 0: a free one, chosen by the bind) and answers for an engine with ``limits``.

    ``rendering``: how the engine's model is prompted, for clients that compare it, and ``weights``: what its weights
    are known by (:func:`gkd.data.model_info.fingerprint_weights`). ``count_steps``: the engine's so far, on any thread.
    Raises ConfigError when the address cannot be bound.
    """

    def __init__(
        self,
        limits: Limits,
        tokenizer_hash: str,
        host: str,
        port: int,
        key: Key,
        client_limits: ClientLimits,
        rendering: Rendering | None,
        weights: str,
        count_steps: Callable[[], int],
    ) -> None:
        self.limits, self.tokenizer_hash, self.session = limits, tokenizer_hash, secrets.token_hex(8)
        self.counts: Counter[str] = Counter()
        self._rendering, self._weights, self._count_steps = rendering, weights, count_steps
        self._clients = Clients(client_limits, self._reject_expired)
        # Who gets it, the message, and the job that the engine took where it is the answer to one.
        self._outgoing: deque[tuple[bytes, bytes, QueuedRequest | None]] = deque()
        self._wakeup, self._closing = Wakeup(), threading.Event()
        self._next_tick = 0.0
        self._context = zmq.Context()
        self._authenticator = Authenticator(self._context, key)
        self._socket = _router(self._context, host, key, wire.largest_request(limits.max_length), client_limits)
        self._connections = Connections(
            self._socket, client_limits, wire.largest_request(limits.max_length), UNREAD_MESSAGES
        )
        try:
            self._connections.port = _bind(self._socket, host, port)
        except ConfigError:
            self._release()
            raise
        self.address = endpoint(host, self._connections.port)
        self._thread = threading.Thread(target=self._run, name="scoring-frontend", daemon=True)
        self._thread.start()

    def take(self, room: int, timeout_s: float) -> list[QueuedRequest]:
        """Take up to ``room`` jobs, one of each client in turn; waits ``timeout_s`` for the first. Expired ones are
        rejected.

        Raises RunFailed when the thread has died.
        """
        return self._clients.take(room, timeout_s)

    def reply(self, answers: Sequence[tuple[QueuedRequest, bytes]]) -> None:
        """Send the answers to jobs that were taken; those to one client that follow each other go together."""
        self._outgoing.extend([(job.client, frame, job) for job, frame in answers])
        self._wakeup.set()

    def reject(self, job: QueuedRequest, code: ErrorCode, message: str) -> None:
        """Answer a job that was taken with an error."""
        self.reply([(job, wire.encode(self._refuse(job.id, code, message)))])

    def close(self, code: ErrorCode, message: str) -> None:
        """Refuse what is queued, send what is to be sent (half a second at most), and give everything back."""
        for job in self._clients.drain():
            self._reject_queued(job, code, message)
        self._closing.set()
        self._wakeup.set()
        self._thread.join(5)
        self._release()

    def _reject_expired(self, job: QueuedRequest) -> None:
        self._reject_queued(job, "expired", "its deadline passed while it waited for the engine")

    def _reject_queued(self, job: QueuedRequest, code: ErrorCode, message: str) -> None:
        self._outgoing.append((job.client, wire.encode(self._refuse(job.id, code, message)), None))
        self._wakeup.set()

    def _refuse(self, id: int | None, code: ErrorCode, message: str) -> wire.Error:
        """Return the answer to a request that gets no other one, which is counted."""
        self.counts[code] += 1
        return wire.Error(id, code, message[:4096])

    def _release(self) -> None:
        self._socket.close(linger=LINGER_MS)
        self._connections.close()
        self._context.destroy(linger=LINGER_MS)
        self._wakeup.close()

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            for source in (self._socket, self._wakeup.fileno(), self._authenticator.socket, self._connections.monitor):
                poller.register(source, zmq.POLLIN)
            while not self._closing.is_set():
                poller.poll(int(TICK_S * 1000))
                self._wakeup.clear()
                self._authenticator.answer()
                self._notice()
                self._send()
                self._receive()
                self._enforce_limits(time.monotonic())
            self._send()
            self._await_readers()
        except BaseException as error:  # the engine's thread raises it from take()
            self._clients.fail(error)

    def _await_readers(self) -> None:
        """Wait until no client is connected any more, for :data:`GRACE_S` at most."""
        end = time.monotonic() + GRACE_S
        self._notice()
        while self._connections and (left_s := end - time.monotonic()) > 0:
            self._connections.monitor.poll(1 + int(left_s * 1000))
            self._notice()

    def _notice(self) -> None:
        """Forget the clients whose connections have ended."""
        for connection in self._connections.update():
            if connection.client is not None:
                self._clients.forget(connection.client)

    def _enforce_limits(self, now: float) -> None:
        """Cut off peers that are silent, that read nothing, or whose message has no end."""
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_S
        for offenders in (self._connections.find_overdrawn(now), self._clients.measure(now)):
            for connection, why in offenders:
                self._cut(connection, why)

    def _cut(self, connection: Connection, why: str) -> None:
        if not connection.is_cut:
            self.counts[f"cut_{why}"] += 1
            connection.cut()
        if connection.client is not None:
            self._clients.forget(connection.client)

    def _send(self) -> None:
        while self._outgoing:
            client = self._outgoing[0][0]
            frames: list[bytes] = []
            while self._outgoing and self._outgoing[0][0] == client:
                _, frame, job = self._outgoing.popleft()
                if self._clients.count_out(client, len(frame), job):
                    frames.append(frame)
                else:
                    self.counts["client_gone"] += 1
            for together in wire.group_frames(frames, wire.MAX_PACKED_REPLIES_BYTES):
                self._send_to(client, together)

    def _send_to(self, client: bytes, frames: Sequence[bytes]) -> None:
        try:
            for part in wire.split(wire.pack(frames)):
                self._socket.send_multipart([client, part], zmq.NOBLOCK, copy=len(part) < MIB)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.counts["client_gone"] += len(frames)

    def _receive(self) -> None:
        # Not for ever: replies wait meanwhile.
        for _ in range(MESSAGES_AT_ONCE):
            try:
                client = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._socket.recv(copy=False)
            whole = not message.more
            while self._socket.rcvmore:
                self._socket.recv(copy=False)
            self._handle(client, message, whole)
        self._wakeup.set()

    def _handle(self, client: bytes, message: zmq.Frame, whole: bool) -> None:
        fd = int(message.get(zmq.SRCFD))
        if self._connections.find(fd) is None:  # it has only just come
            self._notice()
        connection = self._connections.find(fd)
        if connection is None or connection.is_cut:
            return  # it has gone already
        connection.note_message(time.monotonic())
        if connection.client is not None and connection.client != client:
            # One of the two is a peer that has gone, whose descriptor the other has now.
            self._clients.forget(connection.client)
        connection.client = client
        self._clients.add(client, connection)
        if not whole:
            self._cut(connection, "frames")
            return
        answers = self._answers(client, message.bytes)
        if answers:
            self._outgoing.extend([(client, wire.encode(answer), None) for answer in answers])
            self._send()

    def _answers(self, client: bytes, frame: bytes) -> list[wire.Message]:
        """Return what to reply at once to the messages in ``frame``."""
        try:
            frames = wire.unpack(frame)
        except wire.WireError as error:
            return [self._refuse(None, "bad_request", str(error))]
        return [answer for frame in frames if (answer := self._answer(client, frame)) is not None]

    def _answer(self, client: bytes, frame: bytes) -> wire.Message | None:
        """Return what to reply at once; None for a job that went into the queue."""
        id = None
        try:
            body, arrays = wire.decode(frame, wire.MAX_REQUEST_HEADER_BYTES)
            match body:
                case wire.Hello():
                    self._clients.note_greeting(client)
                    return self._welcome()
                case wire.Ping():
                    return wire.Pong(self.session if self._clients.has_greeted(client) else "", self._count_steps())
                case wire.ScoreMessage() | wire.GenerateMessage() | wire.RateMessage():
                    id = body.id
                    if not self._clients.has_greeted(client):
                        raise RequestRejected("not_greeted", "the connection is not the one that was greeted on")
                    request = wire.decode_request(body, arrays)
                    self.limits.check(request)
                    deadline = time.monotonic() + body.remaining_s
                    self._clients.put(
                        QueuedRequest.from_request(client, id, deadline, request, len(frame), self.limits)
                    )
                    return None
            raise wire.WireError(f"{type(body).__name__} is not for a server")
        except wire.WireError as error:
            return self._refuse(id, "bad_request", str(error))
        except RequestRejected as error:
            return self._refuse(id, error.code, error.message)

    def _welcome(self) -> wire.Welcome:
        limits = self.limits
        return wire.Welcome(
            wire.PROTOCOL, self.session, limits.model, self.tokenizer_hash,
            limits.vocabulary, limits.max_top_k, limits.max_length, limits.capacity, self._rendering,
            self._weights,
        )  # fmt: skip


def _router(context: Any, host: str, key: Key, largest_request: int, client_limits: ClientLimits) -> Any:
    """Open a ROUTER socket, not bound yet. What it holds for clients to read is counted in bytes, not by it."""
    socket = context.socket(zmq.ROUTER)
    socket.linger, socket.sndhwm, socket.rcvhwm = 0, 0, UNREAD_MESSAGES
    socket.router_mandatory = True  # a reply that cannot be delivered is counted, not lost in silence
    socket.maxmsgsize = largest_request
    socket.handshake_ivl = int(client_limits.greeting_s * 1000)
    socket.rcvbuf = MIB
    socket.ipv6 = has_only_ipv6(host)
    secure_server(socket, key)
    return socket


def _bind(socket: Any, host: str, port: int) -> int:
    """Return the port that ``socket`` is bound to. Raises ConfigError."""
    try:
        socket.bind(endpoint(host, port) if port else endpoint(host, 0).removesuffix("0") + "*")
    except zmq.ZMQError as error:
        raise ConfigError(f"the server cannot listen on {endpoint(host, port)}: {error.strerror}") from None
    return int(socket.last_endpoint.decode().rsplit(":", 1)[1])
