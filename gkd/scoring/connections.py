"""The TCP connections of a server's socket, which ZeroMQ keeps to itself.

A message is delivered once it is whole, and a reply is out of sight once it is handed over, so what ZeroMQ holds for a
peer has no bound of its own: messages have any number of frames, and high-water marks count messages. The kernel knows
how many bytes each connection has carried. Monitor events state which connections there are.

A kernel that counts no bytes, such as gVisor's, leaves three bounds without effect (of unread answers, of unread time,
of messages without an end); clients are served there all the same.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

MIB = 1 << 20

# In the kernel's struct tcp_info (linux/tcp.h): eight single bytes and 24 words, two rates, then these.
_BYTES_ACKED, _BYTES_RECEIVED, _TCP_INFO_BYTES = 120, 128, 136
_COUNTER = struct.Struct("=Q")


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits of a server's clients. Past ``connections`` the peer that has been silent the longest is cut off.

    Peers are also cut off that have not greeted ``greeting_s`` after they connected, have been silent for ``silent_s``,
    have read nothing of what waits for them for ``unread_s``, or have sent ``partial_bytes`` and the largest requests
    that may wait unread without an end. ``queued_bytes``: requests of one client that wait for the engine.
    ``unread_bytes``: answers to one client that it has not taken off the network, those included that the engine works
    on; one answer may be larger. ``..._in_all``: of all clients together, who then have equal shares.
    """

    connections: int = 1024
    greeting_s: float = 10.0
    silent_s: float = 300.0
    unread_s: float = 60.0
    partial_bytes: int = 4 * MIB
    partial_bytes_in_all: int = 256 * MIB
    queued_bytes: int = 16 * MIB
    queued_bytes_in_all: int = 256 * MIB
    unread_bytes: int = 128 * MIB
    unread_bytes_in_all: int = 1024 * MIB


class Connection:
    """An accepted connection. ``client``: its routing id, once it has sent a message.

    ``last_message_at``: when it last sent one.

    ``port``: that it came in by. Raises OSError where there is none any more, also where ``fd`` is something else's.
    """

    def __init__(self, fd: int, port: int) -> None:
        # A duplicate is this connection from here on, however soon ZeroMQ closes its own and the number is used again.
        duplicate = os.dup(fd)
        try:
            self._socket = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            raise
        # That may have happened already, and to cut off another part of this process is not what is meant.
        is_tcp = self._socket.family in (socket.AF_INET, socket.AF_INET6) and self._socket.type == socket.SOCK_STREAM
        if not is_tcp or self._socket.getsockname()[1] != port:
            self._socket.close()
            raise OSError(f"descriptor {fd} is no connection to port {port} any more")
        self.client: bytes | None = None
        self.last_message_at = time.monotonic()
        self.is_cut = False
        self._received_at_message = 0

    @property
    def acked_bytes(self) -> int | None:
        """Bytes that the peer's kernel has taken so far; None where this kernel does not count."""
        # Where a message has come, bytes have.
        return self._counter(_BYTES_ACKED) if self._received_at_message else None

    @property
    def partial_bytes(self) -> int:
        """Bytes that came since the last message."""
        return self._counter(_BYTES_RECEIVED) - self._received_at_message

    def note_message(self, now: float) -> None:
        """Count from here."""
        self.last_message_at, self._received_at_message = now, self._counter(_BYTES_RECEIVED)

    def cut(self) -> None:
        """End the connection; ZeroMQ then forgets what it holds of and for the peer."""
        self.is_cut = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended by itself
            return

    def close(self) -> None:
        """Give the descriptor back."""
        self._socket.close()

    def _counter(self, offset: int) -> int:
        if self._socket.fileno() < 0:  # closed
            return 0
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) < _TCP_INFO_BYTES:  # an older or another kernel's
            return 0
        return int(_COUNTER.unpack_from(info, offset)[0])


def _raise_descriptor_limit(n_descriptors: int) -> int:
    """Have at least ``n_descriptors`` descriptors allowed; returns how many this process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < n_descriptors:
        soft = min(n_descriptors, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


class Connections:
    """The connections of ``router``, a ROUTER socket that is not bound yet. All of it is used by one thread.

    ``port``: that it is bound to, to be set before :meth:`update` is called.
    """

    def __init__(self, router: Any, client_limits: ClientLimits, largest_request: int, unread_messages: int) -> None:
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        self.monitor = router.get_monitor_socket(events)
        self.port = 0
        self._limits = client_limits
        self._partial_bytes = client_limits.partial_bytes + (1 + unread_messages) * largest_request
        self._by_fd: dict[int, Connection] = {}
        # Each takes two descriptors; half of all are left to the engine.
        self._most = min(client_limits.connections, _raise_descriptor_limit(4 * client_limits.connections) // 4)

    def __len__(self) -> int:
        return len(self._by_fd)

    def find(self, fd: int) -> Connection | None:
        """Return the connection that ZeroMQ reads from descriptor ``fd``."""
        return self._by_fd.get(fd)

    def update(self) -> list[Connection]:
        """Take notice of connections that came and went; returns those that went, closed."""
        gone = []
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            fd = int(event["value"])
            if (old := self._by_fd.pop(fd, None)) is not None:
                old.close()
                gone.append(old)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._add(fd)
        return gone

    def _add(self, fd: int) -> None:
        try:
            self._by_fd[fd] = Connection(fd, self.port)
        except OSError:  # it has gone again
            return
        if len(self._by_fd) > self._most:
            # A peer that has sent nothing yet goes before one that has: clients greet at once and then keep on.
            others = [c for other, c in self._by_fd.items() if other != fd and not c.is_cut]
            if others:
                min(others, key=lambda c: (c.client is not None, c.last_message_at)).cut()

    def find_overdrawn(self, now: float) -> Iterator[tuple[Connection, str]]:
        """Yield connections that are silent, or send what has no end, with what they do."""
        client_limits = self._limits
        alive = [c for c in self._by_fd.values() if not c.is_cut]
        partial = {c: c.partial_bytes for c in alive}
        for connection in alive:
            if now - connection.last_message_at > (
                client_limits.greeting_s if connection.client is None else client_limits.silent_s
            ):
                yield connection, "silent"
            elif partial[connection] > self._partial_bytes:
                yield connection, "endless"
        if sum(partial.values()) > client_limits.partial_bytes_in_all:
            yield max(alive, key=lambda c: partial[c]), "endless"

    def close(self) -> None:
        """Give all descriptors back."""
        self.monitor.close(linger=0)
        for connection in self._by_fd.values():
            connection.close()
        self._by_fd.clear()
