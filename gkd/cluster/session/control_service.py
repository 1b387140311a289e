"""Notices that Ray's control service (the GCS, one process of a cluster's head) is gone.

Workers go on without it, but nothing can be placed or ended through it any more, and after some time Ray ends every
process of the run from inside, in the middle of whatever it does. A run that notices it before can save its state and
state why it ends.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from gkd.cluster.session.port import connect
from gkd.errors import ControlLost

SETTING = "gcs_rpc_server_reconnect_timeout_s"
"""Ray's setting: how long its processes live without the service. In ``_system_config`` it reaches drivers and workers,
but not the raylets, which read it there through the service itself: they take it from :data:`VARIABLE`."""
VARIABLE = f"RAY_{SETTING}"
RAYS_OWN_S = 60.0
INTERVAL_S = 1.0
CONNECT_TIMEOUT_S = 5.0
STUCK_S = 60.0
OWN_TROUBLE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
"""Errors of what this process lacks, which are no sign of the service's state."""


class ControlService:
    """Connects to ``address`` (host:port) every second, in a thread of its own, until :meth:`close`.

    The service is gone when nothing has listened there for ``grace_s`` seconds. The run may then go on for ``finish_s``
    before it has to save its state: :meth:`require` ends it between two steps, :meth:`require_time` in the middle of
    one. Where neither is called for :data:`STUCK_S`, because the run is in a call that waits for the service, the
    process ends with exit code 1.
    """

    def __init__(self, address: str, grace_s: float, finish_s: float) -> None:
        self.address, self._grace_s, self._finish_s = address, grace_s, finish_s
        self._lost, self._closed, self._noticed = threading.Event(), threading.Event(), threading.Event()
        self._answered = self._checked = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="control-service", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        """Whether it is gone."""
        return self._lost.is_set()

    def require(self) -> None:
        """Raise ControlLost when the service is gone: once, so that what is whole can still be saved."""
        self._checked = time.monotonic()
        if self.is_lost and not self._noticed.is_set():
            self._noticed.set()
            raise ControlLost(self._message())

    def require_time(self) -> None:
        """Do what :meth:`require` does, once the service has been gone for ``finish_s``. To be called every second."""
        self._checked = time.monotonic()
        if self.is_lost and self._checked - self._answered > self._finish_s:
            self.require()

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()
        self._noticed.set()
        self._thread.join(CONNECT_TIMEOUT_S + INTERVAL_S)

    def _message(self) -> str:
        return f"Ray's control service (GCS) at {self.address} is gone: without it Ray ends every process of the run"

    def _watch(self) -> None:
        while not self._closed.wait(INTERVAL_S):
            responding, now = self.is_responding(), time.monotonic()
            if responding:
                self._answered = now
            elif now - self._answered > self._grace_s:
                self._lost.set()
                break
        else:
            return
        lost_at = time.monotonic()
        while not self._noticed.wait(INTERVAL_S):
            if time.monotonic() - max(lost_at, self._checked) > STUCK_S:
                print(f"failed: {self._message()}; the run waited for it", file=sys.stderr, flush=True)
                os._exit(1)  # the main thread may be in a call that nothing interrupts

    def is_responding(self) -> bool:
        """Return whether something listens there now; also where this process lacks what it takes to know."""
        try:
            connect(self.address, CONNECT_TIMEOUT_S)
        except OSError as error:
            return error.errno in OWN_TROUBLE
        return True


def finish_s(system_config: Mapping[str, Any], save_s: float) -> float:
    """Return seconds for which a run may go on without the service so that it can still save its state.

    ``system_config`` is that of the cluster; one without :data:`SETTING` was started with :data:`VARIABLE`, which this
    process then has as well, or with Ray's own 60 s. Half of the time, or all but ``save_s``, which saving may take.
    """
    reconnect_s = float(system_config.get(SETTING) or os.environ.get(VARIABLE) or RAYS_OWN_S)
    return max(reconnect_s / 2, reconnect_s - save_s)
