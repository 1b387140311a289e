"""One replica of a scorer at the client: its socket, whether it answers, and the requests that it has."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import zmq

from gkd.config.groups import OVERBOOKED
from gkd.inference.requests import Limits, Request
from gkd.scoring import wire
from gkd.scoring.address import Key, has_only_ipv6, host_of, secure_client
from gkd.scoring.attempts import MOVED, NO_ANSWER, RESTARTED, ConnectionAttempts

MISSED_BEATS = 3
RETRY_S = 0.05  # between attempts to greet a server that is not there yet
REOPEN_S = 10.0
"""Time after which a socket without a connection is replaced: ZeroMQ reports nothing when it gives an address up for
good, as it does once something else has answered there."""
BUSY_S = 0.2  # until a server that has too much of this client's in its queue is sent more
SEND_HWM = 4_096


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A request under way. ``sent`` and ``replica`` are of its latest attempt, ``history`` of earlier ones.

    Of several that wait the least goes first: that of the lower ``order``, and of these the earlier one.
    """

    id: int
    request: Request
    future: Future[Any]
    submitted: float
    order: tuple[float, int] = (0, 0)
    attempts: int = 0
    sent: float = 0.0
    replica: Replica | None = None
    moved: bool = False  # from a suspect replica to another one
    history: list[str] = field(default_factory=list)

    def __lt__(self, other: PendingRequest) -> bool:
        return (self.order, self.id) < (other.order, other.id)


class Replica:
    """A DEALER socket to one address. It is out until the server has answered a greeting.

    ``scorer`` names the model. ``name`` is the first address. :attr:`address` is where it is now, and while it is
    :attr:`suspect` others are preferred; both may be set from any thread. :attr:`progressed` (``time.monotonic``) is
    when it was last seen to get on. :attr:`fault` is why it is out, as far as that is known.

    The socket takes messages only while it is connected, and a replica that goes out gets a new one, so that nothing
    waits in it for a server that is not there, to be sent when nobody wants the answer any more.
    """

    def __init__(
        self,
        name: str,
        key: Key,
        heartbeat_s: float,
        n_clients: int,
        largest_reply: int,
        scorer: str,
    ) -> None:
        self.name = self.address = name
        self.suspect, self.fault = False, ""
        # A thread of its own: a name is looked up again at each reconnect, which holds up all that its thread serves.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._key, self._heartbeat_s = key, heartbeat_s
        self._n_clients, self._largest_reply, self._scorer = n_clients, largest_reply, scorer
        self.busy_until = 0.0
        self.welcome: wire.Welcome | None = None
        self.outstanding: dict[int, PendingRequest] = {}
        # Requests that were given up here, and that the server may still be working on; when they were sent, by id.
        self.abandoned: dict[int, float] = {}
        self.out_since = self.progressed = time.monotonic()
        self.expected_until = 0.0  # time.monotonic; it is being started until then
        self._missed, self._heard, self._next_beat, self._steps = 0, True, 0.0, 0
        self._has_only_ipv6 = has_only_ipv6(host_of(name))  # here: the thread of all replicas must not wait for it
        self.socket = self._open()

    @property
    def limits(self) -> Limits:
        """What the server can answer, by its welcome."""
        assert self.welcome is not None, "only of a replica that answers"
        w = self.welcome
        return Limits(self._scorer, w.model, w.vocabulary, w.max_top_k, w.max_length, w.capacity)

    @property
    def load(self) -> int:
        """Requests it is working on, by this client's count."""
        return len(self.outstanding) + len(self.abandoned)

    @property
    def has_room(self) -> bool:
        """Whether it takes another request at once."""
        if self.welcome is None or time.monotonic() < self.busy_until:
            return False
        return self.load < math.ceil(OVERBOOKED * self.welcome.capacity / self._n_clients)

    def accept_welcome(self, welcome: wire.Welcome) -> None:
        """Count the server in, which has answered."""
        self._attempts.close()
        self.fault = ""
        self.welcome, self.expected_until = welcome, 0.0
        self.progressed = time.monotonic()  # what waited for it has its time from now on

    def note_steps(self, steps: int) -> None:
        """Note how many steps the engine has done, whomever for: what it was sent waits its turn there."""
        if steps != self._steps:
            self._steps, self.progressed = steps, time.monotonic()

    def beat(self, now: float) -> str:
        """Greet or ping when it is time. Returns why the replica is to be put out, empty where it is not."""
        if self._connected != self.address:
            return MOVED
        if self.welcome and not self.socket.poll(0, zmq.POLLOUT):
            return "ended the connection"  # as the end of its process does
        if self.welcome is None:
            self.fault = self._attempts.find_fault() or self.fault
        if now < self._next_beat:
            return ""
        self._missed = 0 if self._heard else self._missed + 1
        if self._missed >= MISSED_BEATS:
            return NO_ANSWER
        sent = self.send(wire.encode(wire.Ping() if self.welcome else wire.Hello(wire.PROTOCOL)))
        if not sent and self.welcome is None and now - self._opened >= REOPEN_S:
            return self.fault or NO_ANSWER
        # While there is no connection nothing is missed; ZeroMQ keeps trying.
        self._heard = not sent
        self._next_beat = now + (self._heartbeat_s if sent else RETRY_S)
        return ""

    def reset(self, now: float, reason: str) -> None:
        """Put the replica out for this reason, and start over with a new socket."""
        if self.welcome is not None:
            self.out_since = now
        self._attempts.close()
        self.socket.close(linger=0)
        self.fault = "" if reason in (MOVED, RESTARTED) else reason
        self.welcome, self._missed, self._heard, self._next_beat = None, 0, True, 0.0
        self.outstanding.clear()
        self.abandoned.clear()
        self.busy_until = 0.0
        self.socket = self._open()

    def check(self, request: Request, size: int) -> None:
        """Raise RequestRejected for what is so long, ``size`` bytes, that the server would hang up and not answer."""
        if size > wire.largest_request(self.limits.max_length):
            self.limits.check(request)

    def pack(self, frames: Sequence[bytes]) -> Iterator[list[bytes]]:
        """Yield neighbours among requests' ``frames`` that go together, as the server takes them."""
        return wire.group_frames(frames, wire.largest_request(self.limits.max_length))

    def send(self, frame: bytes) -> bool:
        """Send, or return that it is not possible now."""
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._next_beat = 0.0  # find out why at once
            return False
        return True

    def receive(self) -> Iterator[bytes]:
        """Receive messages that have arrived. Raises WireError for one of several frames, which can have any length.

        Parts of a message count as answers to a heartbeat and as progress: its own answer waits behind them.
        """
        socket = self.socket
        while socket is self.socket:  # a message may lead to a reset
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if socket.rcvmore:
                raise wire.WireError("a message of several frames")
            self._heard = True
            if (whole := self._joiner.add(frame)) is not None:
                yield whole
            else:
                self.progressed = time.monotonic()

    def close(self) -> None:
        """Close the connection; what was not sent is dropped."""
        self._context.destroy(linger=0)

    def _open(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.linger, socket.immediate = 0, True
        socket.sndhwm, socket.rcvhwm = SEND_HWM, SEND_HWM
        socket.maxmsgsize = wire.largest_frame(self._largest_reply)
        self._joiner = wire.Joiner(self._largest_reply)
        socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 1000
        socket.ipv6 = "[" in self.address or self._has_only_ipv6
        secure_client(socket, self._key)
        self._attempts = ConnectionAttempts(socket)
        self._connected, self._opened = self.address, time.monotonic()
        socket.connect(self._connected)
        return socket
