"""The states of engines and replicas: every change of every state, and the ways that lead back to work."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gkd.cluster.health.fleet import NEXT, PRESENT, WORKING, Fleet, Health, HealthEvent
from gkd.cluster.health.watched import RestartPolicy, WatchedGroup
from gkd.cluster.workers.failure import NodeLost, WorkerDied
from gkd.cluster.workers.group import Group
from gkd.errors import RunFailed
from tests.cluster.layout.test_assignment import report
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
    fleet = Fleet("rollout", 2)
    fleet._health[1] = before
    if change in ALLOWED[before]:
        assert fleet.change(1, change) is fleet.health(1) is ALLOWED[before][change]
    else:
        with pytest.raises(ValueError, match=f"^rollout 1 is {before.name}, to which {change.name} cannot happen$"):
            fleet.change(1, change)
        assert fleet.health(1) is before
    assert fleet.health(0) is Health.HEALTHY


@given(st.lists(st.sampled_from(HealthEvent), max_size=40))
def test_from_death_back_to_work_only_with_all_that_it_takes(changes: list[HealthEvent]) -> None:
    """A new process, and what it works with; and each counts once."""
    fleet = Fleet("teacher", 1)
    since_death: list[HealthEvent] = [HealthEvent.RESTARTED, HealthEvent.STARTED, HealthEvent.READY]
    for change in changes:
        if (fleet.health(0), change) not in NEXT:
            continue
        after = fleet.change(0, change)
        since_death = [] if change is HealthEvent.DIED else [*since_death, change]
        if after in WORKING:
            assert since_death[:3] == [HealthEvent.RESTARTED, HealthEvent.STARTED, HealthEvent.READY]
        assert fleet.present == ([0] if after in PRESENT else [])
        assert fleet.absent == ([] if after in PRESENT else [0])


def group_of(name: str, *workers: str) -> Group:
    return Group(name, workers, tuple(report(name, rank, rank) for rank in range(len(workers))))


def watch(name: str, n: int, restart_policy: RestartPolicy | None) -> WatchedGroup:
    return WatchedGroup(name, group_of(name, *["first"] * n), 60.0, "timeout_s", restart_policy)


def test_what_dies_is_started_again_so_often_and_then_given_up() -> None:
    attempts: list[int] = []
    threads: list[threading.Thread] = []

    def start(member: int) -> Group:
        attempts.append(member)
        if len(attempts) == 1:
            raise OSError("no room")
        return group_of("rollout", f"worker {len(attempts)}")

    watched = watch("rollout", 2, RestartPolicy(2, start, threads))

    def take() -> list[int]:
        for thread in threads:
            thread.join(60)
        return list(watched.take_in_restarted())

    assert watched.lose(1, DEATH).endswith("(1 of cluster.worker_restarts=2)")
    assert take() == []  # it did not start, and is started once more
    assert watched.fleet.health(1) is Health.RESTARTING
    assert take() == [1]
    assert watched.group.workers == ("first", "worker 2")
    assert watched.fleet.members(Health.STALE) == [1]
    assert take() == []
    watched.fleet.change(1, HealthEvent.READY)
    assert watched.lose(1, DEATH).endswith(": cluster.worker_restarts=2")
    assert watched.lose(0, DEATH).endswith("(1 of cluster.worker_restarts=2)")  # the run waits for it
    assert take() == [0]
    assert watched.group.workers == ("worker 3", "worker 2")
    assert attempts == [1, 1, 0]


def test_a_start_that_takes_too_long_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where Ray's control service hangs, whose answer has no deadline."""
    go, threads, now = threading.Event(), list[threading.Thread](), [100.0]
    monkeypatch.setattr("gkd.cluster.health.watched.time", SimpleNamespace(monotonic=lambda: now[0]))

    def start(member: int) -> Group:
        assert go.wait(30)
        return group_of("rollout", "worker")

    watched = watch("rollout", 2, RestartPolicy(3, start, threads, within_s=0.2))
    watched.lose(1, DEATH)
    assert watched.take_in_restarted() == {} and not caplog.messages
    now[0] += 0.3
    assert watched.take_in_restarted() == watched.take_in_restarted() == {}
    (text,) = caplog.messages
    assert contains_in_order(text, "rollout 1", "0.2 s")
    go.set()
    threads[0].join(60)
    assert watched.take_in_restarted().keys() == {1}


def test_where_nothing_is_left_and_nothing_comes_the_run_ends() -> None:
    threads: list[threading.Thread] = []

    def start(member: int) -> Group:
        raise RunFailed("a node left")

    watched = watch("rollout", 1, RestartPolicy(1, start, threads))
    watched.lose(0, DEATH)
    threads[0].join(60)
    with pytest.raises(RunFailed, match=r"\brollout 0 .*: .*node left$"):
        watched.take_in_restarted()
    assert watched.fleet.health(0) is Health.RETIRED

    def on_a_node_that_left(member: int) -> Group:
        raise NodeLost("workers could not be started again: a node left")

    watched = watch("reference", 2, RestartPolicy(3, on_a_node_that_left, threads))
    watched.lose(1, DEATH)
    threads[-1].join(60)
    assert watched.take_in_restarted() == {}
    assert watched.fleet.health(1) is Health.RETIRED  # at once: what was reserved there is gone with it

    refused = watch("teacher", 2, RestartPolicy(3, start, [], "an obstacle"))
    assert refused.lose(0, DEATH).endswith(": an obstacle")
    assert ":" not in watch("teacher", 2, None).lose(1, DEATH)  # nothing is the reason: none was to be started
    with pytest.raises(WorkerDied, match="killed"):
        refused.lose(1, DEATH)
