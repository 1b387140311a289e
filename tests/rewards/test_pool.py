"""How many calls of a reward are under way at a time; the processes that compute it are played."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from multiprocessing import Pipe
from typing import Any, ClassVar

import pytest

from gkd.config import Reward
from gkd.rewards.completion import Completion
from gkd.rewards.pool import RewardPool
from gkd.rewards.process import Timed, _evaluate_as_they_come
from tests.rewards.test_rewards import MODULE, make_completion

ASYNC, OTHER_ASYNC, SYNC = f"{MODULE}:noted", f"{MODULE}:longer", f"{MODULE}:words"


class Process:
    """Answers once it may, those of ``held`` numbers of tokens last, and keeps what it was given, and how many samples
    it had at a time.
    """

    may_answer = threading.Event()
    held: ClassVar[set[int]] = set()
    release = threading.Event()
    given: list[str]
    most: list[list[int]]

    def __init__(self, *_: Any) -> None:
        type(self).given, type(self).most = [], []
        self.has: dict[int, Sequence[Completion]] = {}

    def send(self, number: int, name: str, group: Sequence[Completion], timeout_s: float) -> None:
        self.given.append(name)
        self.has[number] = group
        self.most.append([len(group) for group in self.has.values()])

    def receive(self, wait_s: float) -> tuple[int, list[Timed | str]] | None:
        assert self.may_answer.wait(30)
        free = [
            number for number, group in self.has.items() if self.release.is_set() or group[0].n_tokens not in self.held
        ]
        if not free:
            self.release.wait(wait_s)
            return None
        return free[0], [(completion.n_tokens, 0.0) for completion in self.has.pop(free[0])]

    def end(self) -> None:
        """There is nothing to end."""

    close = end


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gkd.rewards.pool.RewardProcess", Process)
    Process.may_answer.clear()
    Process.release.clear()
    monkeypatch.setattr(Process, "held", set())


@pytest.mark.parametrize(
    ("function", "size", "most"),
    [("words", 1, 1), ("noted", 1, 5), ("ranked", 2, 1), ("ranked_later", 2, 2), ("ranked_later", 6, 1)],
)
def test_no_more_samples_wait_at_a_time_than_the_concurrency(function: str, size: int, most: int) -> None:
    """Of an async function, in whole groups; but one group at least. Any other is called for one after the other."""
    name = f"{MODULE}:{function}"
    pool = RewardPool(Reward(functions=[name], workers=1, concurrency=5))
    try:
        groups = [[make_completion("", n=10 * first + i) for i in range(size)] for first in range(12)]
        futures = [pool.submit_group(own) if size > 1 else [pool.submit(own[0])] for own in groups]
        Process.may_answer.set()
        rewards = [[own[name].result(30)[0] for own in its] for its in futures]
    finally:
        pool.close()
    assert rewards == [[10 * first + i for i in range(size)] for first in range(12)]
    assert max(map(len, Process.most)) == most
    assert len(Process.given) == 12 and {n for call in Process.most for n in call} == {size}


def test_a_call_that_takes_long_keeps_no_other_from_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Process, "held", {0})
    pool = RewardPool(Reward(functions=[ASYNC], workers=1, concurrency=3))
    try:
        futures = [pool.submit(make_completion("", n=n))[ASYNC] for n in range(20)]
        Process.may_answer.set()
        assert [future.result(30)[0] for future in futures[1:]] == list(range(1, 20))
        late = pool.submit(make_completion("", n=20))[ASYNC]  # while one is under way
        assert late.result(30)[0] == 20
        assert not futures[0].done()
        Process.release.set()
        assert futures[0].result(30)[0] == 0
    finally:
        pool.close()
    assert max(map(len, Process.most)) == 3


@pytest.mark.parametrize(("other", "workers"), [(SYNC, 1), (SYNC, 2), (OTHER_ASYNC, 1), (OTHER_ASYNC, 2)])
def test_what_many_wait_for_holds_up_no_other_function(other: str, workers: int) -> None:
    pool = RewardPool(Reward(functions=[ASYNC, other], workers=workers, concurrency=3))
    try:
        futures = [pool.submit(make_completion("", n=n)) for n in range(60)]
        Process.may_answer.set()
        assert [[own[name].result(30)[0] for name in own] for own in futures] == [[n, n] for n in range(60)]
    finally:
        pool.close()
    begun = [Process.given.index(name) for name in (ASYNC, other)]
    assert max(begun) < 30
    assert max(map(len, Process.most)) == 3


def test_what_comes_once_the_last_async_reward_is_answered_may_be_of_another_function() -> None:
    """It is there before the loop knows that nothing is under way, and is not awaited."""

    async def later(completion: Completion) -> float:
        return 0.5

    ours, theirs = Pipe()
    answered, group = dict[int, Any](), [make_completion("a")]

    def answer(number: int, answers: list[Timed | str]) -> None:
        answered[number] = answers[0][0]
        if number == 0:
            ours.send((1, SYNC, group, 1.0))

    functions, settings = {ASYNC: later, SYNC: lambda completion: 1.0}, Reward(functions=[ASYNC, SYNC])
    with ours, theirs:
        request = (0, ASYNC, group, 1.0)
        left = asyncio.run(_evaluate_as_they_come(functions, (), settings, theirs, request, answer))
    assert answered == {0: 0.5}
    assert left is not None and left[:2] == (1, SYNC)
