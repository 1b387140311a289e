"""What clients of models that score are informed of their replicas, as the driver watches them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gkd.cluster.health.heartbeat import Heartbeat
from gkd.scoring.watch import ExpectedReplica, ScorerModel, ScorerWatch

ADDRESSES = ["tcp://a:1", "tcp://b:1"]


class Workers(tuple[str, ...]):
    """Two workers of a group that nobody calls."""

    reports = ("teacher rank 0", "teacher rank 1")


@pytest.fixture
def watch() -> ScorerWatch:
    serving: Any = SimpleNamespace(refs=("first", "second"))
    group: Any = Workers(("first", "second"))
    return ScorerWatch({"teacher": ScorerModel(group, serving, ADDRESSES, 10.0, 60.0)})


def test_clients_are_informed_who_is_suspect_and_who_no_more(
    watch: ScorerWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [0.0, 0.0]
    monkeypatch.setattr(Heartbeat, "find_hanging", lambda *_: [])
    monkeypatch.setattr(Heartbeat, "silent_s", lambda _, member: silent[member])
    assert watch.poll() == watch.absent_replicas() == []
    silent[1] = 6.0
    assert watch.poll() == [ExpectedReplica("teacher", "tcp://b:1", 10.0, "tcp://b:1", suspect=True)]
    assert watch.absent_replicas() == [ExpectedReplica("teacher", "tcp://b:1", 60.0, "tcp://b:1", suspect=True)]
    assert watch.poll() == []  # once
    silent[1] = 0.0
    assert watch.poll() == [ExpectedReplica("teacher", "tcp://b:1", 0.0, "tcp://b:1")]
    assert watch.poll() == watch.absent_replicas() == []
