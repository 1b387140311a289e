"""The states of engines and replicas: every change of every state, and the ways that lead back to work."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gkd.cluster.health.fleet import NEXT, PRESENT, WORKING, Fleet, Health, HealthEvent
from gkd.cluster.health.restarts import RestartPolicy, Restarts
from gkd.cluster.workers.failure import NodeLost, WorkerDied
from gkd.errors import RunFailed
from tests.error_text import contains_in_order

H, C = Health, HealthEvent
DEATH = WorkerDied("killed")
ALLOWED = {
    H.HEALTHY: {C.SILENT: H.SUSPECT, C.DIED: H.DEAD, C.READY: H.HEALTHY},
    H.SUSPECT: {C.ANSWERED: H.HEALTHY, C.DIED: H.DEAD, C.READY: H.HEALTHY},
    H.DEAD: {C.RESTARTED: H.RESTARTING, C.GIVEN_UP: H.RETIRED},
    H.RESTARTING: {C.STARTED: H.STALE, C.DIED: H.DEAD},
    H.STALE: {C.READY: H.HEALTHY, C.DIED: H.DEAD},
    H.RETIRED: {},
}


@pytest.mark.parametrize(("before", "change"), list(itertools.product(Health, HealthEvent)))
def test_every_change_of_every_state(before: Health, change: HealthEvent) -> None:
    fleet = Fleet()
    fleet.add("rollout", 2)
    fleet._health["rollout", 1] = before
    if change in ALLOWED[before]:
        assert fleet.change("rollout", 1, change) is fleet.health("rollout", 1) is ALLOWED[before][change]
    else:
        with pytest.raises(ValueError, match=f"^rollout 1 is {before.name}, to which {change.name} cannot happen$"):
            fleet.change("rollout", 1, change)
        assert fleet.health("rollout", 1) is before
    assert fleet.health("rollout", 0) is Health.HEALTHY


@given(st.lists(st.sampled_from(HealthEvent), max_size=40))
def test_from_death_back_to_work_only_with_all_that_it_takes(changes: list[HealthEvent]) -> None:
    """A new process, and what it works with; and each counts once."""
    fleet = Fleet()
    fleet.add("teacher", 1)
    since_death: list[HealthEvent] = [HealthEvent.RESTARTED, HealthEvent.STARTED, HealthEvent.READY]
    for change in changes:
        if (fleet.health("teacher", 0), change) not in NEXT:
            continue
        after = fleet.change("teacher", 0, change)
        since_death = [] if change is HealthEvent.DIED else [*since_death, change]
        if after in WORKING:
            assert since_death[:3] == [HealthEvent.RESTARTED, HealthEvent.STARTED, HealthEvent.READY]
        assert fleet.members("teacher", *PRESENT) == ([0] if after in PRESENT else [])
        assert fleet.members("reference", *Health) == []


def test_what_dies_is_started_again_so_often_and_then_given_up() -> None:
    fleet, attempts, threads = Fleet(), [], []
    fleet.add("rollout", 2)

    def start(member: int) -> object:
        attempts.append(member)
        if len(attempts) == 1:
            raise OSError("no room")
        return f"worker {len(attempts)}"

    restarts = Restarts(fleet, "rollout", RestartPolicy(2, start, threads))  # type: ignore[arg-type]

    def take() -> dict[int, object]:
        for thread in threads:
            thread.join(10)
        return restarts.take()  # type: ignore[return-value]

    assert restarts.lose(1, DEATH).endswith("(1 of cluster.worker_restarts=2)")
    assert take() == {}  # it did not start, and is started once more
    assert fleet.health("rollout", 1) is Health.RESTARTING
    assert take() == {1: "worker 2"}
    assert fleet.members("rollout", Health.STALE) == [1]
    assert take() == {}
    fleet.change("rollout", 1, HealthEvent.READY)
    assert restarts.lose(1, DEATH).endswith(": cluster.worker_restarts=2")
    assert restarts.lose(0, DEATH).endswith("(1 of cluster.worker_restarts=2)")  # the run waits for it
    assert take() == {0: "worker 3"}
    assert attempts == [1, 1, 0]


def test_a_start_that_takes_too_long_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """As where Ray's control service hangs, whose answer has no deadline."""
    fleet, go = Fleet(), threading.Event()
    fleet.add("rollout", 2)

    def start(member: int) -> object:
        assert go.wait(30)
        return "worker"

    threads: list[threading.Thread] = []
    restarts = Restarts(fleet, "rollout", RestartPolicy(3, start, threads, within_s=0.2))  # type: ignore[arg-type]
    restarts.lose(1, DEATH)
    assert restarts.take() == {} and not caplog.messages
    time.sleep(0.3)
    assert restarts.take() == restarts.take() == {}
    (text,) = caplog.messages
    assert contains_in_order(text, "rollout 1", "0.2 s")
    go.set()
    threads[0].join(10)
    assert restarts.take() == {1: "worker"}


def test_where_nothing_is_left_and_nothing_comes_the_run_ends() -> None:
    fleet = Fleet()
    fleet.add("rollout", 1)

    def start(member: int) -> object:
        raise RunFailed("a node left")

    threads: list[object] = []
    restarts = Restarts(fleet, "rollout", RestartPolicy(1, start, threads))  # type: ignore[arg-type]
    restarts.lose(0, DEATH)
    threads[0].join(10)  # type: ignore[attr-defined]
    with pytest.raises(RunFailed, match=r"\brollout 0 .*: .*node left$"):
        restarts.take()
    assert fleet.health("rollout", 0) is Health.RETIRED

    fleet.add("reference", 2)

    def on_a_node_that_left(member: int) -> object:
        raise NodeLost("workers could not be started again: a node left")

    restarts = Restarts(fleet, "reference", RestartPolicy(3, on_a_node_that_left, threads))  # type: ignore[arg-type]
    restarts.lose(1, DEATH)
    threads[-1].join(10)  # type: ignore[attr-defined]
    assert restarts.take() == {}
    assert fleet.health("reference", 1) is Health.RETIRED  # at once: what was reserved there is gone with it

    fleet.add("teacher", 3)
    refused = Restarts(fleet, "teacher", RestartPolicy(3, start, [], "an obstacle"))  # type: ignore[arg-type]
    assert refused.lose(0, DEATH).endswith(": an obstacle")
    assert ":" not in Restarts(fleet, "teacher").lose(1, DEATH)  # nothing is the reason: none was to be started
    with pytest.raises(WorkerDied, match="killed"):
        refused.lose(2, DEATH)
