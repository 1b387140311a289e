"""Wake a thread that sleeps in a ZeroMQ poll."""

from __future__ import annotations

import socket
from contextlib import suppress


class Wakeup:
    """One thread polls :meth:`fileno` and calls :meth:`clear`; any thread may call :meth:`set`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._is_set = False

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._reader.fileno()

    def set(self) -> None:
        """Wake the poller, now or at its next poll."""
        if not self._is_set:
            self._is_set = True
            self._writer.send(b"!")

    def clear(self) -> None:
        """Forget the calls so far; before a look at what they were about."""
        with suppress(BlockingIOError):  # nothing is left
            self._reader.recv(4096)
        self._is_set = False  # last: a call that comes before is about what is looked at now

    def close(self) -> None:
        """Give back both ends."""
        self._reader.close()
        self._writer.close()
