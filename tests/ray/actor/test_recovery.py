"""A rank that fails in a chunk while others wait for it, and an engine that came back and needs the weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import ray

from gkd.actor.group import ActorGroup
from gkd.cluster.workers.group import PendingCall, attend_until_done, read_outcome
from gkd.config import load
from gkd.driver.groups.weight_sync import WeightSync
from gkd.errors import OutOfMemory, RunFailed
from tests.ray.cluster.conftest import eventually
from tests.samples import training_sample


@ray.remote(num_cpus=0)
def run_out(budget: int) -> None:
    raise OutOfMemory("chunk 1 does not fit", budget)


@ray.remote(num_cpus=0)
def fail() -> None:
    raise RunFailed("the rank is lost")


@ray.remote(num_cpus=0)
def compute(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


class Ranks:
    """Two ranks, whose calls are these, one after the other."""

    def __init__(self, *calls: Sequence[Any]) -> None:
        self.left, self.budgets = list(calls), list[int]()

    def __len__(self) -> int:
        return 2

    def submit_each(self, method: str, args: Sequence[Any], activity: str = "") -> PendingCall:
        return PendingCall(activity, ("actor rank 0", "actor rank 1"), tuple(self.left.pop(0)))

    def call(self, method: str, budget: int, timeout_s: float) -> None:
        self.budgets.append(budget)


def start(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[ActorGroup, WeightSync, list[list[int]]]:
    actor = ActorGroup(ranks, load({"actor": {"max_tokens_per_micro_batch": 60}}), "", lambda: ranks)
    monkeypatch.setattr(actor, "_start_again", lambda: None)
    sync, pushed = WeightSync.__new__(WeightSync), list[list[int]]()
    sync.actor = actor
    monkeypatch.setattr(sync, "push", lambda engines: pushed.append(list(engines)))
    return actor, sync, pushed


@pytest.mark.parametrize("both", [False, True])
def test_chunks_begin_again_before_an_engine_gets_weights(
    both: bool, local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank out of memory with the other in a collective with it, which never ends; or each in another layer."""
    gate = ray.remote(num_cpus=0, max_concurrency=2)(threading.Event).remote()
    first = [run_out.remote(30), run_out.remote(30) if both else compute.remote(1000.0)]
    ranks = Ranks(first, [ray.put(0.1), gate.wait.remote()])
    actor, sync, pushed = start(ranks, monkeypatch)
    actor.accumulate([[training_sample(0)]])
    assert eventually(lambda: read_outcome(PendingCall("", ("", ""), tuple(first))) is False, 30)
    sync.refresh([0])
    assert ranks.budgets == [30] and not ranks.left
    assert not pushed and actor.accumulates  # the chunk again
    ray.get(gate.set.remote(), timeout=30)
    assert eventually(lambda: not actor.accumulates, 30)
    sync.refresh([0])
    assert pushed == [[0]]
    ray.cancel(first[1], force=True)
    ray.kill(gate)


def test_what_else_a_rank_failed_with_ends_the_wait(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = [fail.remote(), compute.remote(1000.0)]
    actor, sync, pushed = start(Ranks(refs), monkeypatch)
    actor.accumulate([[training_sample(0)]])
    assert eventually(lambda: read_outcome(PendingCall("", ("", ""), tuple(refs))) is False, 30)
    for act in (lambda: sync.refresh([0]), lambda: actor.accumulate([[training_sample(1)]])):
        with pytest.raises(RunFailed, match=r"\brank\b"):
            act()
    assert not pushed
    ray.cancel(refs[1], force=True)


def test_others_are_attended_to_until_the_last_rank_is_done(local_ray: None) -> None:
    gate = ray.remote(num_cpus=0, max_concurrency=2)(threading.Event).remote()
    call = PendingCall("writing", ("actor rank 0", "actor rank 1"), (ray.put(1), gate.wait.remote()))
    seen: list[int] = []

    def attend(refs: Sequence[Any]) -> None:
        seen.append(len(refs))
        if len(seen) == 4:
            gate.set.remote()
        ray.wait(list(refs), timeout=0.2)

    attend_until_done(call, 0.5, lambda refs: time.sleep(0.1))
    assert read_outcome(call) is None  # its time is over
    attend_until_done(call, 60, attend)
    assert seen[0] == 2 and set(seen[1:]) == {1}
    assert read_outcome(call) is True
    ray.kill(gate)


def test_others_are_not_attended_to_once_a_rank_has_failed(local_ray: None) -> None:
    """The other waits for it in a collective."""
    call = PendingCall("writing", ("actor rank 0", "actor rank 1"), (fail.remote(), compute.remote(1000.0)))
    assert eventually(lambda: read_outcome(call) is False, 30)
    attend_until_done(call, 60, lambda refs: pytest.fail("it goes on"))
    ray.cancel(call.refs[1], force=True)


def test_nothing_is_sent_behind_a_chunk_that_fails_in_this_moment() -> None:
    """Whose other ranks may never answer."""

    class Failing:
        accumulates = True

        def recover_chunks(self) -> None:
            self.accumulates = False  # right after it was looked at

    sync: Any = WeightSync.__new__(WeightSync)
    sync.actor, sync.push = Failing(), lambda engines: pytest.fail("it is sent")
    sync.refresh([0])
