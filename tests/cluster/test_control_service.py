"""Ray's control service is missed once nothing listens any more, and that ends a run once."""

from __future__ import annotations

import socket
import time

import pytest

from gkd.cluster.control_service import ControlService
from gkd.errors import RunFailed
from tests.ray.cluster.conftest import eventually


def test_it_is_missed_when_it_is_gone_and_the_run_ends_once() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{server.getsockname()[1]}"
    at_once, patient = ControlService(address, 0.0, 600.0), ControlService(address, 600.0, 600.0)
    try:
        time.sleep(1.5)
        at_once.require()
        assert not at_once.lost
        server.close()
        assert eventually(lambda: at_once.lost)
        with pytest.raises(RunFailed, match=rf"control service \(GCS\) at {address} is gone"):
            at_once.require()
        at_once.require()  # a checkpoint can be written
        assert not patient.lost  # a cluster may start it again
    finally:
        at_once.close()
        patient.close()
