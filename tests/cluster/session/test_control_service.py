"""Ray's control service is missed once nothing listens any more, and that ends a run once, wherever it waits."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gkd.cluster.health.watched import RestartPolicy
from gkd.cluster.session import control_service
from gkd.cluster.session.control_service import ControlService, finish_s
from gkd.cluster.workers import group
from gkd.cluster.workers.group import Group, PendingCall, gather, wait
from gkd.errors import ControlLost, RunFailed, catch_errors
from gkd.scoring.watch import ScorerReplicas, ScorerWatch
from tests.cluster.layout.test_assignment import report
from tests.ray.cluster.conftest import eventually


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def address(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_it_is_missed_when_it_is_gone_and_the_run_ends_once(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_service, "INTERVAL_S", 0.05)
    where = address(server)
    at_once, patient, grace = (ControlService(where, *s) for s in ((0.0, 0.0), (0.0, 600.0), (600.0, 0.0)))
    try:
        time.sleep(0.2)
        at_once.require()
        at_once.require_time()
        assert not at_once.is_lost
        server.close()
        assert eventually(lambda: at_once.is_lost and patient.is_lost)
        patient.require_time()  # there is time to finish the step
        with pytest.raises(ControlLost, match=rf"control service \(GCS\) at {where} is gone"):
            patient.require()
        with pytest.raises(ControlLost):
            at_once.require_time()
        at_once.require()  # a checkpoint can be written
        assert not grace.is_lost  # a cluster may start it again
    finally:
        for service in (at_once, patient, grace):
            service.close()


def test_time_to_finish_is_what_ray_leaves_without_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(control_service.VARIABLE, raising=False)
    assert finish_s({}, 1800.0) == 30.0  # Ray's own 60 s
    assert finish_s({control_service.SETTING: 3900}, 1800.0) == 2100.0
    monkeypatch.setenv(control_service.VARIABLE, "7200")
    assert finish_s({}, 1800.0) == 5400.0


def test_it_ends_a_run_with_one_line_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise ControlLost("gone")

    assert not issubclass(ControlLost, RunFailed)  # which is a warning where a checkpoint is written
    assert catch_errors(run) == 1
    assert capsys.readouterr().err == "failed: gone\n"


class Lost:
    """A control service that has been gone for longer than a run may go on."""

    is_lost = True

    def require(self) -> None:
        raise ControlLost("gone")

    require_time = require


@pytest.mark.parametrize("wait", [lambda call: gather([call], 600.0), lambda call: wait(call, 600.0)])
def test_every_wait_for_workers_looks_whether_it_is_there(monkeypatch: pytest.MonkeyPatch, wait: object) -> None:
    """Workers that never answer."""
    monkeypatch.setattr(group.ray, "wait", lambda refs, **_: ([], refs))
    with pytest.raises(ControlLost):
        wait(PendingCall("learning", ("actor rank 0",), ("ref",), Lost()))  # type: ignore[operator,arg-type]


def an_update() -> None:
    gather([PendingCall("learning", ("actor rank 0",), ("ref",), Lost())], 600.0)  # type: ignore[arg-type]


def a_replica() -> None:
    worker = SimpleNamespace(call=SimpleNamespace(remote=lambda method: "ref"))
    replicas = Group("teacher", (worker,), (report("teacher", 0, 0),), Lost())  # type: ignore[arg-type]
    never: Any = None
    ScorerWatch([ScorerReplicas("teacher", replicas, ["tcp://a:1"], 60.0, RestartPolicy(0, never, []))]).lose("ref")


@pytest.mark.parametrize("lose", [an_update, a_replica])
def test_what_ray_would_ask_it_for_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, lose: Callable[[], None]) -> None:
    """Why a worker died: the call is done, but getting what came of it does not return."""

    def never(ref: str, timeout: float) -> None:
        raise group.GetTimeoutError

    monkeypatch.setattr(group.ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(group.ray, "get", never)
    with pytest.raises(ControlLost):
        lose()


def test_no_worker_is_ended_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray hands the function that ends a process to the service first, and waits for it."""
    monkeypatch.setattr(group, "_kill", None)
    Group("rollout", (None,), (report("rollout", 0, 0),), Lost()).end(0)  # type: ignore[arg-type]
