"""The groups of several copies of the student, as the first of four ranks sees them; torch plays the others."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gkd.actor.copies import Copies


@pytest.mark.filterwarnings("ignore:Set timeout")
@pytest.mark.parametrize(("size", "met"), [(2, [[0, 2], [0, 1, 2, 3]]), (1, [[0, 1, 2, 3]] * 2), (4, [])])
def test_ranks_of_several_copies_meet_before_memory_is_taken(
    size: int, met: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL takes memory of its own at a group's first collective: after an update torch may hold all of it."""
    groups: list[list[int]] = []
    monkeypatch.setattr(
        dist, "all_reduce", lambda _, group: groups.append(dist.get_process_group_ranks(group or dist.group.WORLD))
    )
    store: Any = FakeStore()
    dist.init_process_group("fake", rank=0, world_size=4, store=store)
    try:
        copies = Copies.join("cpu", 4, size, datetime.timedelta(seconds=9))
        assert (copies.n, copies.number, copies.mesh.mesh.tolist()) == (4 // size, 0, list(range(size)))
    finally:
        dist.destroy_process_group()
    assert groups == met
    assert torch.distributed.is_initialized() is False
