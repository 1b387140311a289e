"""What the driver makes of engines at the deadline of a push. Without engines."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from gkd.cluster.workers.failure import WorkerHung
from gkd.config import load
from gkd.driver.groups import weight_sync
from gkd.driver.groups.weight_sync import WeightSync
from gkd.errors import RunFailed
from tests.error_text import contains_in_order

LATE = [[WorkerHung("late")]]


def wait(
    monkeypatch: pytest.MonkeyPatch, progress: dict[int, tuple[int | None, int, float]]
) -> tuple[dict[int, Any], dict[int, str]]:
    """Wait for a push that is over its time once; returns what is served, and the engines that were lost, with why."""
    sync: Any = object.__new__(WeightSync)
    sync.config, lost = load({"weights": {"timeout_s": 6.0}}), dict[int, str]()
    sync.rollout = SimpleNamespace(
        group=SimpleNamespace(reports=["rollout rank 0", "rollout rank 1"]),
        lose=lambda engine, failure: lost.update({engine: str(failure)}),
    )
    waits = iter([LATE, [[{1: 4}]]])
    monkeypatch.setattr(weight_sync, "gather", lambda calls, deadline, keep_late: next(waits))
    monkeypatch.setattr(sync, "_progress", lambda: progress)
    return sync._wait_for("sending", "weights version 4"), lost


def test_one_that_got_a_bucket_in_the_moment_of_the_deadline_is_not_taken_for_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert wait(monkeypatch, {0: (2, 1, 6.5), 1: (4, 3, 0.01)}) == ({1: 4}, {})


def test_those_that_hang_are_lost_with_their_bucket_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    served, lost = wait(monkeypatch, {0: (2, 1, 6.5), 1: (3, 3, 6.2)})
    assert served == {1: 4} and list(lost) == [0]
    assert contains_in_order(lost[0], "bucket 2", "version 4", " 6 s", "rollout rank 0")
    assert list(wait(monkeypatch, {0: (None, 0, math.inf), 1: (3, 3, 6.2)})[1]) == [0]


def test_where_no_engine_has_anything_to_load_it_is_the_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunFailed, match=r"^late$"):
        wait(monkeypatch, {0: (3, 3, 6.5), 1: (3, 3, 6.2)})


@pytest.mark.parametrize(("served", "ends"), [({0: 4, 1: 4}, False), ({0: 4, 1: 3}, True)])
def test_an_engine_that_serves_other_weights_than_it_was_sent_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, served: dict[int, int], ends: bool
) -> None:
    sync: Any = object.__new__(WeightSync)
    updated: list[dict[int, int]] = []
    sync.config, sync.actor, sync._transfer = load({}), SimpleNamespace(version=4), SimpleNamespace(collective=False)
    sync.rollout = SimpleNamespace(
        group=SimpleNamespace(reports=["rollout rank 0", "rollout rank 1"]),
        engines=SimpleNamespace(take_in_restarted=lambda: None),
        colocation=SimpleNamespace(prepare_push=lambda: None),
        present_engines=[0, 1],
        mark_updated=updated.append,
    )
    monkeypatch.setattr(sync, "_send", lambda about: served)
    if ends:
        with pytest.raises(RunFailed, match=r"^rollout rank 1 .*\b3\b.*\b4$"):
            sync._push(None)
    else:
        sync._push(None)
    assert updated == ([] if ends else [served])
