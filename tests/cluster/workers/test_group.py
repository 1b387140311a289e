"""What the driver makes of workers that wait for each other, of which one dies. Ray is played."""

from __future__ import annotations

from typing import Any

import pytest

from gkd.cluster.workers import group
from gkd.cluster.workers.failure import WorkerDied
from gkd.cluster.workers.group import gather_partners
from gkd.config import load
from gkd.driver.checkpoints.restart import may_begin_again
from gkd.errors import OutOfMemory, RunFailed

RESET = RunFailed("actor rank 0: RuntimeError: Connection reset by peer")


@pytest.mark.parametrize(
    ("failure", "death", "begins_again"),
    [
        (RESET, WorkerDied("actor rank 1 died"), True),
        (RESET, None, False),
        (OutOfMemory("the actor ran out of memory", 30), WorkerDied("actor rank 1 died"), False),
    ],
    ids=["a death behind it", "none", "a reason of its own"],
)
def test_a_run_begins_again_after_a_rank_that_others_waited_for_died(
    failure: RunFailed, death: WorkerDied | None, begins_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise failure

    monkeypatch.setattr(group, "gather", fail)
    monkeypatch.setattr(group, "find_first_death", lambda *_: death)
    with pytest.raises(RunFailed) as caught:
        gather_partners([], 1.0)
    assert may_begin_again(load({}), caught.value, private=False) is begins_again
    assert str(failure) in str(caught.value)
