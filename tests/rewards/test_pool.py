"""How many calls of a reward are under way at a time; the processes that compute it are played."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from gkd.config import Reward
from gkd.rewards.completion import Completion
from gkd.rewards.pool import RewardPool
from tests.rewards.test_rewards import MODULE, make_completion


class Process:
    """Answers once it may, and keeps how many samples it was given at a time."""

    may_answer = threading.Event()
    given: list[list[int]]

    def __init__(self, *_: Any) -> None:
        type(self).given = []

    def evaluate(
        self, name: str, groups: Sequence[Sequence[Completion]], timeout_s: float
    ) -> list[tuple[float, float]]:
        self.given.append([len(group) for group in groups])
        assert self.may_answer.wait(30)
        return [(completion.n_tokens, 0.0) for group in groups for completion in group]

    def end(self) -> None:
        """There is nothing to end."""

    close = end


@pytest.mark.parametrize(
    ("function", "size", "most"),
    [("words", 1, 1), ("noted", 1, 5), ("ranked", 2, 1), ("ranked_later", 2, 2), ("ranked_later", 6, 1)],
)
def test_no_more_samples_wait_at_a_time_than_the_concurrency(
    function: str, size: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an async function, in whole groups; but one group at least. Any other is called for one after the other."""
    monkeypatch.setattr("gkd.rewards.pool.RewardProcess", Process)
    Process.may_answer.clear()
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
    assert max(map(len, Process.given)) == most
    assert sum(map(len, Process.given)) == 12 and {n for call in Process.given for n in call} == {size}
