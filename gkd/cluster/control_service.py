"""Notices that Ray's control service (the GCS, one process of a cluster's head) is gone.

Workers go on without it, but nothing can be placed or ended through it any more, and after some time Ray ends the
driver from inside, in the middle of whatever it does. Noticed before that, a run can save its state and say why.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time

from gkd.errors import RunFailed

INTERVAL_S = 1.0
CONNECT_TIMEOUT_S = 5.0
OWN_TROUBLE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
"""What this process lacks says nothing of the service."""
START_PATIENCE_S = 60.0
"""Nobody looks while groups are placed and models load; a run that waits there for the service ends after this time."""


class ControlService:
    """Connects to ``address`` (host:port) every second, in a thread of its own, until :meth:`close`.

    It is gone when nothing has listened there for ``grace_s`` seconds. :meth:`require` then ends the run; where that is
    not called within ``patience_s``, because the run waits for what cannot come, the process ends with exit code 1.
    """

    def __init__(self, address: str, grace_s: float, patience_s: float) -> None:
        self.address, self._grace_s, self._patience_s = address, grace_s, patience_s
        self._lost, self._closed, self._noticed = threading.Event(), threading.Event(), threading.Event()
        self._looked = False
        self._thread = threading.Thread(target=self._watch, name="control-service", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Whether it is gone."""
        return self._lost.is_set()

    def require(self) -> None:
        """Raise RunFailed when the service is gone: once, so that what is whole can still be saved."""
        self._looked = True
        if self.lost and not self._noticed.is_set():
            self._noticed.set()
            raise RunFailed(self._message())

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()
        self._noticed.set()
        self._thread.join(CONNECT_TIMEOUT_S + INTERVAL_S)

    def _message(self) -> str:
        return f"Ray's control service (GCS) at {self.address} is gone: without it Ray ends every process of the run"

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(INTERVAL_S):
            answers, now = self._answers(), time.monotonic()
            if answers:
                last = now
            elif now - last > self._grace_s:
                self._lost.set()
                break
        else:
            return
        if not self._noticed.wait(self._patience_s if self._looked else START_PATIENCE_S):
            print(f"failed: {self._message()}; the run waited for it", file=sys.stderr, flush=True)
            os._exit(1)  # the main thread may be in a call that nothing interrupts

    def _answers(self) -> bool:
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            return error.errno in OWN_TROUBLE
        return True
