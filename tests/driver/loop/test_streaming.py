"""How a batch is cut into chunks, and which runs do not: the actor is played, advantages are the run's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gkd.algorithms.advantages import AdvantageEstimator
from gkd.algorithms.training_samples import assign_advantages
from gkd.config import Config, load
from gkd.driver.loop.streaming import BatchStream
from gkd.errors import ConfigError
from gkd.types import TrainingSample
from tests.driver.loop.test_collect import grpo
from tests.samples import training_sample


class PlayedActor:
    """Holds 60 tokens at a time, and keeps what it is given."""

    def __init__(self) -> None:
        self.chunks: list[list[TrainingSample]] = []
        self.updated: list[Any] = []

    def fits(self, samples: Sequence[TrainingSample]) -> bool:
        return sum(sample.n_tokens for sample in samples) <= 60

    def accumulate(self, chunks: Sequence[Sequence[TrainingSample]]) -> None:
        assert chunks
        self.chunks += map(list, chunks)

    def apply(self, step: int) -> dict[str, float]:
        self.updated.append(step)
        return {}

    def update(self, batch: Sequence[TrainingSample], step: int) -> dict[str, float]:
        self.updated.append((list(batch), step))
        return {}


def batch_of(lengths: Sequence[int]) -> list[TrainingSample]:
    rewards = [{"accuracy": float(i % 3 == 0)} for i in range(len(lengths))]
    return [training_sample(i, i // 2, i % 2, n=n, rewards=rewards[i]) for i, n in enumerate(lengths)]


def streamed(config: Config, batch: Sequence[TrainingSample], cuts: Sequence[int]) -> PlayedActor:
    actor: Any = PlayedActor()
    stream = BatchStream(config, actor)
    for start, stop in zip([0, *cuts], [*cuts, len(batch)], strict=True):
        stream.feed(batch[start:stop])
    stream.update(assign_advantages(config, batch), 3)
    return actor


@given(st.lists(st.integers(1, 50), min_size=8, max_size=8), st.lists(st.integers(0, 8), max_size=5).map(sorted))
def test_chunks_depend_on_the_samples_and_not_on_when_they_come(lengths: list[int], cuts: list[int]) -> None:
    config, batch = grpo(1), batch_of(lengths)
    at_once, actor = streamed(config, batch, []), streamed(config, batch, cuts)
    assert actor.chunks == at_once.chunks and actor.updated == at_once.updated
    settled = assign_advantages(config, batch)
    if actor.chunks:
        assert [sample for chunk in actor.chunks for sample in chunk] == settled  # advantages of whole groups
        assert actor.updated == [3] and len(actor.chunks) > 1
        assert all(len(chunk) % 2 == 0 for chunk in actor.chunks)
        tokens = [sum(sample.n_tokens for sample in chunk) for chunk in actor.chunks]
        assert all(n <= 60 for n, chunk in zip(tokens, actor.chunks, strict=True) if len(chunk) > 2)
    else:
        assert actor.updated == [(settled, 3)]


def test_without_rewards_samples_are_streamed_one_by_one() -> None:
    config = load({"rollout": {"n": 4}})
    assert [len(chunk) for chunk in streamed(config, batch_of([20] * 8), []).chunks] == [2, 2, 2, 2]


class OverTheBatch(AdvantageEstimator):
    """Looks at all groups."""

    def compute_advantages(self, rewards: Any) -> Any:
        return rewards

    def __call__(self, rewards: Any, groups: Any) -> Any:
        return rewards


class Inherits(OverTheBatch):
    """Looks at all groups as well."""


class GroupByGroup(OverTheBatch):
    """Looks at one group at a time."""

    needs_batch = False

    def __call__(self, rewards: Any, groups: Any) -> Any:
        return rewards


class ComparesRuns(AdvantageEstimator):
    """Looks at all groups in code of its own elsewhere."""

    needs_batch = True

    def compute_advantages(self, rewards: Any) -> Any:
        return rewards


class Mixed(ComparesRuns):
    """Inherits what it needs."""


def test_a_class_needs_the_batch_where_it_overrides_call_or_states_so() -> None:
    assert OverTheBatch.needs_batch and Inherits.needs_batch
    assert not GroupByGroup.needs_batch
    assert ComparesRuns.needs_batch and Mixed.needs_batch
    assert not AdvantageEstimator.needs_batch


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"actor": {"epochs": 2}}, "actor.epochs=2 learns from each batch several times"),
        ({"actor": {"mini_batch_size": 4}}, "actor.mini_batch_size=4 makes several updates of a batch"),
        ({"algorithm": {"dynamic_sampling": {"max_rounds": 3}}}, "max_rounds=3 chooses from the whole batch"),
        ({"algorithm": {"advantage": {"name": f"{__name__}:OverTheBatch"}}}, "OverTheBatch looks at all groups"),
    ],
)
def test_what_needs_the_whole_batch_does_not_stream(changes: dict[str, dict[str, Any]], why: str) -> None:
    def settings(streaming: bool | str) -> Config:
        base: dict[str, Any] = {
            "algorithm": {"name": "grpo"}, "rollout": {"n": 2}, "trainer": {"batch_size": 4},
            "reward": {"functions": ["accuracy"]}, "schedule": {"streaming": streaming},
        }  # fmt: skip
        return load({**base, **{name: {**base.get(name, {}), **section} for name, section in changes.items()}})

    assert not settings("auto").streams
    assert why in (settings("auto").streaming_obstacle or "")
    with pytest.raises(ConfigError, match=r"schedule\.streaming=true: .*; schedule\.streaming=auto"):
        settings(True)


def test_an_actor_that_shares_its_gpus_does_not_stream_by_itself() -> None:
    shared = {"rollout": {"colocate_with": "actor"}}
    assert load({}).streams and not load({"schedule": {"streaming": False}}).streams
    assert not load(shared).streams and load({**shared, "schedule": {"streaming": True}}).streams
    taking_turns = load({**shared, "cluster": {"offload": True}})
    assert "offloaded" in (taking_turns.streaming_obstacle or "")
