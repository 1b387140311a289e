"""The server's side of the wire: a ROUTER socket with a thread of its own, and a queue towards the engine.

The thread answers handshakes and heartbeats at once, also while the engine is busy, and refuses at once what no engine
could answer. What the engine can do waits in the queue with the moment after which nobody wants the answer any more.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import zmq

from gkd.errors import ConfigError, RunFailed
from gkd.teacher import wire
from gkd.teacher.address import Key, endpoint, require_key, secure_server
from gkd.teacher.requests import Code, Limits, Refused, Request
from gkd.teacher.wakeup import Wakeup
from gkd.teacher.zap import Gatekeeper

MAX_QUEUED = 16_384
SEND_HWM = 4_096  # replies that wait for one client, which never has more requests out than the queue holds
LINGER_MS = 500
POLL_MS = 1_000
GRACE_S = 0.2  # clients lose what they have not read yet when a connection ends


@dataclass(frozen=True, slots=True)
class Job:
    """A request in the queue: who asked, under which id, and until when (``time.monotonic``) the answer is of use."""

    client: bytes
    id: int
    deadline: float
    request: Request


class Frontend:
    """Binds ``host:port`` (port 0: a free one, chosen by the bind) and answers for an engine with ``limits``.

    Raises ConfigError when the address cannot be bound, or is not loopback and there is no key.
    """

    def __init__(self, limits: Limits, tokenizer_hash: str, host: str, port: int, key: Key | None) -> None:
        require_key(host, key)
        self.limits, self.tokenizer_hash, self.session = limits, tokenizer_hash, secrets.token_hex(8)
        self.counts: Counter[str] = Counter()
        self._queue: deque[Job] = deque()
        self._filled = threading.Condition()
        self._outbox: deque[list[wire.Frame]] = deque()
        self._wakeup, self._closing = Wakeup(), threading.Event()
        self._failure: BaseException | None = None
        self._context = zmq.Context()
        self._gatekeeper = Gatekeeper(self._context, key) if key is not None else None
        try:
            self._socket, bound = _bind(self._context, host, port, key)
        except ConfigError:
            self._release()
            raise
        self.address = endpoint(host, bound)
        self._thread = threading.Thread(target=self._run, name="teacher-frontend", daemon=True)
        self._thread.start()

    def take(self, room: int, timeout_s: float) -> list[Job]:
        """Up to ``room`` jobs from the queue, in order; waits ``timeout_s`` for the first. Expired ones are answered.

        Raises RunFailed when the thread has died.
        """
        with self._filled:
            if room > 0 and not self._queue and timeout_s > 0:
                self._filled.wait_for(lambda: self._queue or self._failure, timeout_s)
            if self._failure is not None:
                raise RunFailed(f"the teacher's socket thread died: {self._failure!r}") from self._failure
            jobs: list[Job] = []
            while self._queue and len(jobs) < room:
                job = self._queue.popleft()
                if job.deadline > time.monotonic():
                    jobs.append(job)
                else:
                    self.refuse(job, "expired", "its deadline passed while it waited for the engine")
        return jobs

    def reply(self, job: Job, frames: list[wire.Frame]) -> None:
        """Send the answer to a job."""
        self._outbox.append([job.client, *frames])
        self._wakeup.set()

    def refuse(self, job: Job, code: Code, message: str) -> None:
        """Answer a job with an error."""
        self.counts[code] += 1
        self.reply(job, wire.encode(wire.Error(job.id, code, message[:4096])))

    def close(self, code: Code = "stopping", message: str = "the server is stopping") -> None:
        """Refuse what is queued, send what is to be sent (half a second at most), and give everything back."""
        if self._closing.is_set():
            return
        with self._filled:
            waiting, self._queue = list(self._queue), deque()
        for job in waiting:
            self.refuse(job, code, message)
        self._closing.set()
        self._wakeup.set()
        self._thread.join(5)
        self._release()

    def _release(self) -> None:
        self._context.destroy(linger=LINGER_MS)
        self._wakeup.close()

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._wakeup.fileno(), zmq.POLLIN)
            if self._gatekeeper is not None:
                poller.register(self._gatekeeper.socket, zmq.POLLIN)
            while not self._closing.is_set():
                poller.poll(POLL_MS)
                self._wakeup.clear()
                if self._gatekeeper is not None:
                    self._gatekeeper.answer()
                self._send()
                self._receive()
            self._send()
            time.sleep(GRACE_S)
        except BaseException as error:  # the engine's thread raises it from take()
            with self._filled:
                self._failure = error
                self._filled.notify_all()
        finally:
            self._socket.close(linger=LINGER_MS)

    def _send(self) -> None:
        while self._outbox:
            try:
                self._socket.send_multipart(self._outbox.popleft(), zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self.counts["client_too_slow"] += 1  # it will ask again
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self.counts["client_gone"] += 1

    def _receive(self) -> None:
        # Not for ever: replies wait meanwhile.
        for _ in range(256):
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            answer = self._answer(client, frames)
            if answer is not None:
                self._outbox.append([client, *wire.encode(answer)])
                self._send()
        self._wakeup.set()

    def _answer(self, client: bytes, frames: list[bytes]) -> wire.Message | None:
        """What to reply at once; None for a job that went into the queue."""
        id = None
        try:
            body, arrays = wire.decode(frames)
            match body:
                case wire.Hello():
                    return self._welcome()
                case wire.Ping():
                    return wire.Pong(self.session)
                case wire.Score() | wire.Generate() | wire.Rate():
                    id = body.id
                    request = wire.decode_request(body, arrays)
                    self.limits.check(request)
                    self._enqueue(Job(client, id, time.monotonic() + body.remaining_s, request))
                    return None
            raise wire.WireError(f"{type(body).__name__} is not for a server")
        except wire.WireError as error:
            refused = Refused("bad_request", str(error))
        except Refused as error:
            refused = error
        self.counts[refused.code] += 1
        return wire.Error(id, refused.code, refused.message[:4096])

    def _enqueue(self, job: Job) -> None:
        with self._filled:
            if len(self._queue) >= MAX_QUEUED:
                raise Refused("busy", f"{MAX_QUEUED} requests are waiting already")
            self._queue.append(job)
            self._filled.notify_all()

    def _welcome(self) -> wire.Welcome:
        limits = self.limits
        return wire.Welcome(
            wire.PROTOCOL, self.session, limits.model, self.tokenizer_hash,
            limits.vocabulary, limits.max_top_k, limits.max_length, limits.capacity,
        )  # fmt: skip


def _bind(context: Any, host: str, port: int, key: Key | None) -> tuple[Any, int]:
    """A bound ROUTER socket and its port."""
    socket = context.socket(zmq.ROUTER)
    socket.linger, socket.sndhwm, socket.rcvhwm = 0, SEND_HWM, SEND_HWM
    socket.router_mandatory = True  # a reply that cannot be delivered is counted, not lost in silence
    socket.maxmsgsize = wire.MAX_REQUEST_BYTES
    socket.ipv6 = ":" in host
    if key is not None:
        secure_server(socket, key)
    try:
        socket.bind(endpoint(host, port) if port else endpoint(host, 0).removesuffix("0") + "*")
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"the teacher cannot listen on {endpoint(host, port)}: {error.strerror}") from None
    return socket, int(socket.last_endpoint.decode().rsplit(":", 1)[1])
