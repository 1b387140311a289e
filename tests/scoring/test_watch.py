"""What clients of models that score are informed of their replicas, as the driver watches them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gkd.cluster.health.heartbeat import Heartbeat
from gkd.cluster.health.watched import RestartPolicy
from gkd.cluster.workers.group import Group
from gkd.scoring.watch import ExpectedReplica, ScorerReplicas, ScorerWatch
from tests.cluster.layout.test_assignment import report

ADDRESSES = ["tcp://a:1", "tcp://b:1"]


@pytest.fixture
def watch() -> ScorerWatch:
    workers = tuple(SimpleNamespace(call=SimpleNamespace(remote=lambda method: method)) for _ in ADDRESSES)
    group = Group("teacher", workers, (report("teacher", 0, 0), report("teacher", 1, 1)))
    never: Any = None
    return ScorerWatch([ScorerReplicas("teacher", group, ADDRESSES, 10.0, RestartPolicy(0, never, [], within_s=60.0))])


def test_clients_are_informed_who_is_suspect_and_who_no_more(
    watch: ScorerWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [0.0, 0.0]
    monkeypatch.setattr(Heartbeat, "find_hanging", lambda *_: [])
    monkeypatch.setattr(Heartbeat, "measure_silence_s", lambda _, member: silent[member])
    assert watch.poll() == watch.list_absent_replicas() == []
    silent[1] = 6.0
    assert watch.poll() == [ExpectedReplica("teacher", "tcp://b:1", 10.0, "tcp://b:1", suspect=True)]
    assert watch.list_absent_replicas() == [ExpectedReplica("teacher", "tcp://b:1", 60.0, "tcp://b:1", suspect=True)]
    assert watch.poll() == []  # once
    silent[1] = 0.0
    assert watch.poll() == [ExpectedReplica("teacher", "tcp://b:1", 0.0, "tcp://b:1")]
    assert watch.poll() == watch.list_absent_replicas() == []
