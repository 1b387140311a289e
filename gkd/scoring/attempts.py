"""Why a client has no connection to a server: ZeroMQ tries again and again, and only monitor events have what fails."""

from __future__ import annotations

from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

NO_ANSWER = "does not answer (it hangs, or cannot be reached)"
NO_CONNECTION = "takes no connections"
NO_NAME = "has a name that is unknown here"
NO_HANDSHAKE = "ended the handshake: it has another key (teacher.key_file), or is no gkd serve-teacher"
CUT_OFF = "ended the connection before it answered"
MOVED, RESTARTED = "has moved", "was restarted"
"""Why a connection is given up, and nothing that keeps the next one from its server."""


class ConnectionAttempts:
    """The attempts of ``socket``, which is not connected yet, to reach a server. Used by one thread, the socket's.

    A peer of another key, and one that is no server, end each handshake without a word; one that stops, a single one.
    """

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        )  # fmt: skip
        self._has_address = self._has_shaken_hands = False
        self._n_ended = 0  # handshakes that the peer ended, one after the other
        self._fault = ""

    def find_fault(self) -> str:
        """Return why the newest attempt failed that did; empty where none has."""
        while self._monitor.poll(0):
            self._note(recv_monitor_message(self._monitor)["event"])
        return self._fault

    def close(self) -> None:
        """Watch the socket no more."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def _note(self, event: int) -> None:
        match event:
            case zmq.EVENT_CLOSED:
                self._fault, self._n_ended = NO_CONNECTION, 0
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._n_ended = 0
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._n_ended += 1
            case zmq.EVENT_DISCONNECTED:  # without either where something else answered
                self._fault = CUT_OFF if self._has_shaken_hands or self._n_ended == 1 else NO_HANDSHAKE
            case zmq.EVENT_CONNECT_RETRIED if not self._has_address:
                self._fault = NO_NAME
        self._has_shaken_hands = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._has_address = event != zmq.EVENT_CONNECT_RETRIED
