"""One step's samples: who is asked, and when a batch is full. The engines are played by a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gkd.algorithms.training_samples import with_advantages
from gkd.config import Config, load
from gkd.data.model_info import ModelInfo
from gkd.data.stream import PromptStream
from gkd.driver.checkpoints.checkpoint import RunState
from gkd.driver.loop.collect import Batches, requests_of, scoring_of
from gkd.driver.loop.train import train
from gkd.errors import ConfigError, RunFailed
from gkd.types import Prompt, SampleRequest, Scoring, TrainingSample
from tests.samples import training_sample

PROMPTS = [Prompt(i, np.array([i], np.int32), str(i)) for i in range(100)]


class Engines:
    """Gives each request the reward that ``worth`` says, and keeps the requests."""

    def __init__(self, worth: Callable[[SampleRequest], float | str]) -> None:
        self.worth, self.calls = worth, []

    def submit(self, requests: Sequence[SampleRequest], order: int = 0) -> list[int]:
        first = sum(map(len, self.calls))
        self.calls.append(list(requests))
        return list(range(first, first + len(requests)))

    def collect_in_order(self, keys: Sequence[int], timeout_s: float) -> Iterator[list[TrainingSample]]:
        requests = [request for call in self.calls for request in call]
        yield self.finished([requests[key] for key in keys])

    def finished(self, requests: Sequence[SampleRequest]) -> list[TrainingSample]:
        return [
            training_sample(i, r.prompt.id, r.index, rewards={"accuracy": self.worth(r)} if r.scoring.rewards else {})
            for i, r in enumerate(requests)
        ]


def grpo(rounds: int) -> Config:
    return load(
        {
            "algorithm": {"name": "grpo", "dynamic_sampling": {"max_rounds": rounds}},
            "rollout": {"n": 2},
            "trainer": {"batch_size": 4},
            "reward": {"functions": ["accuracy"]},
        }
    )


def collected(config: Config, engines: Engines) -> list[int]:
    """Prompts of a step's batch, after checking that samples of one prompt are neighbours."""
    rollout: Any = engines
    batches = Batches(config, PromptStream(PROMPTS, seed=0), rollout, 50, RunState(step=2))
    batches.dispatch(version=2)
    collected = batches.collect(step=3)
    with_advantages(config, collected.batch, collected.left_out)
    assert len(collected.batch) == config.trainer.batch_size * config.rollout.n
    assert len(collected.batch + collected.left_out) == sum(map(len, engines.calls))
    prompts = [sample.prompt_id for sample in collected.batch]
    assert prompts[::2] == prompts[1::2]
    return prompts[::2]


def test_without_dynamic_sampling_every_group_is_kept() -> None:
    engines = Engines(lambda request: 1.0)
    assert len(collected(grpo(1), engines)) == 4
    assert len(engines.calls) == 1


def test_groups_of_equal_rewards_make_room_until_the_batch_is_full() -> None:
    engines = Engines(lambda request: float(request.prompt.id % 3 == 0 and request.index))
    kept = collected(grpo(20), engines)
    assert all(i % 3 == 0 for i in kept)
    assert len(set(kept)) == 4
    assert len(engines.calls) > 1
    seeds = [request.seed for requests in engines.calls for request in requests]
    assert len(set(seeds)) == len(seeds)


def test_the_limit_of_rounds_holds_and_the_rest_is_filled() -> None:
    engines = Engines(lambda request: 0.0)
    assert len(collected(grpo(3), engines)) == 4
    assert [len(requests) for requests in engines.calls] == [8, 8, 8]


def test_which_scorers_a_sample_goes_to() -> None:
    assert scoring_of(grpo(1), 50) == Scoring(None, 1.0, reference=False, rewards=True)
    assert scoring_of(load({"algorithm": {"loss": {"top_k": 7, "temperature": 2.0}}}), 50) == Scoring(7, 2.0)
    advised = load({"algorithm": {"name": "grpo", "advantage": {"teacher_kl": 0.1}}, "rollout": {"n": 2}})
    assert scoring_of(advised, 200_000) == Scoring(0, 1.0, rewards=True)  # no more than the tokens sampled
    both = load({"algorithm": {"kl": {"coef": 0.1}}})
    assert scoring_of(both, 50).reference
    with_lora = load({"algorithm": {"kl": {"coef": 0.1}}, "actor": {"lora": {"r": 4}}})
    assert not scoring_of(with_lora, 50).reference  # the actor without its adapter is the reference


@pytest.mark.parametrize(("share", "own"), [(1.0, 0), (0.75, 2), (0.0, 8)])
def test_a_share_of_the_prompts_is_answered_by_the_data(share: float, own: int) -> None:
    config = load({"algorithm": {"on_policy_share": share}})
    requests = requests_of(config, PROMPTS[:8], Scoring(), step=1)
    assert sum(request.from_dataset for request in requests) == own


@pytest.mark.parametrize(("mini_batch_size", "mixed"), [(4, True), (16, False), (None, False)])
def test_every_mini_batch_has_its_share_of_the_datas_answers(mini_batch_size: int | None, mixed: bool) -> None:
    algorithm, actor = {"on_policy_share": 0.5}, {"mini_batch_size": mini_batch_size}
    config = load({"algorithm": algorithm, "rollout": {"n": 2}, "actor": actor})
    own = [request.from_dataset for request in requests_of(config, PROMPTS[:8], Scoring(), step=1)]
    assert sum(own) == 8
    assert [sum(own[i : i + 4]) for i in range(0, 16, 4)] == ([2, 2, 2, 2] if mixed else [4, 4, 0, 0])


@pytest.mark.parametrize(("size", "share"), [(1, 0.9), (3, 0.5), (4, 0.9), (7, 0.25), (64, 0.99)])
def test_the_share_holds_over_the_run_at_any_batch_size(size: int, share: float) -> None:
    """And a step's part depends on nothing but its number, so that a resumed run goes on exactly."""
    config = load({"algorithm": {"on_policy_share": share}, "rollout": {"n": 2}})

    def own(step: int) -> int:
        return sum(request.from_dataset for request in requests_of(config, PROMPTS[:size], Scoring(), step)) // 2

    n_from_dataset = 0
    for step in range(1, 101):
        n_from_dataset += own(step)
        assert abs(n_from_dataset - step * size * (1 - share)) <= 0.5 + 1e-9


def test_no_two_samples_of_a_run_have_one_seed() -> None:
    """Neither within a step nor between steps, where an epoch brings the same prompts again."""
    config = load({"rollout": {"n": 3}})
    seeds = [request.seed for step in (1, 2, 3) for request in requests_of(config, PROMPTS[:8], Scoring(), step)]
    assert len(set(seeds)) == 3 * 8 * 3
    again = [request.seed for step in (1, 2, 3) for request in requests_of(config, PROMPTS[8:16], Scoring(), step)]
    assert seeds == again  # the place in the run alone counts


def test_what_fills_up_is_mixed_with_the_rest() -> None:
    """Every mini-batch has its share of the groups from which nothing can be learned; none is made of them alone."""
    engines = Engines(lambda request: float(request.prompt.id % 2 == 0 and request.index))
    config = grpo(2)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"batch_size": 40})})
    kept = collected(config, engines)
    fillers = [i % 2 for i in kept]
    assert 4 <= sum(fillers) <= 16  # of the prompts of two rounds, about a quarter of the batch
    quarters = [sum(fillers[i : i + 10]) for i in range(0, 40, 10)]
    assert max(quarters) - min(quarters) <= 1
    assert len(set(kept)) == 40


def test_a_group_that_a_failed_reward_leaves_equal_is_sampled_again() -> None:
    def worth(request: SampleRequest) -> float | str:
        return "ValueError: no" if request.prompt.id % 3 == 0 and request.index else 1.0 - request.index

    assert all(i % 3 for i in collected(grpo(20), Engines(worth)))


def test_rewards_that_fail_on_what_is_sampled_again_count() -> None:
    """Otherwise a function that fails on half of the prompts would only make every step take twice as long."""

    def worth(request: SampleRequest) -> float | str:
        return "ValueError: no" if request.prompt.id % 2 else 1.0 - request.index

    with pytest.raises(RunFailed, match=r"reward accuracy .*\d+ of \d+ samples, .*ValueError: no"):
        collected(grpo(20), Engines(worth))


@pytest.mark.parametrize(("rounds", "fails_on"), [(1, range(100)), (3, range(100)), (30, range(0, 100, 4))])
def test_samples_are_written_before_rewards_that_fail_end_the_run(rounds: int, fails_on: Sequence[int]) -> None:
    """They show what the function failed on, though dynamic sampling left them out of the batch."""
    written: list[TrainingSample] = []

    def worth(request: SampleRequest) -> float | str:
        return "ValueError: no" if request.prompt.id in fails_on else float(request.prompt.id % 2 * request.index)

    parts: Any = SimpleNamespace(
        prompts=PromptStream(PROMPTS, seed=0),
        rollout=(engines := Engines(worth)),
        model=ModelInfo(50, None, [], 50),
        device="cpu",
        actor=SimpleNamespace(fits=lambda lengths: True),
        answers=None,
    )
    log: Any = SimpleNamespace(
        stops_early=False, samples=SimpleNamespace(write=lambda step, samples: written.extend(samples))
    )
    strict = grpo(rounds).with_settings({"reward.max_failed_share": 0.01})
    with pytest.raises(RunFailed, match="reward accuracy"):
        train(strict, parts, log, RunState())
    failed = [request.prompt.id for call in engines.calls for request in call if request.prompt.id in fails_on]
    assert failed and sorted(sample.prompt_id for sample in written) == sorted(failed)


def test_the_teacher_and_what_was_sampled_are_at_one_temperature() -> None:
    both = {"reward_weight": 1.0, "advantage": {"teacher_kl": 0.1}}

    def tree(temperature: float, **algorithm: object) -> dict[str, object]:
        return {
            "algorithm": algorithm, "rollout": {"n": 2, "temperature": temperature},
            "reward": {"functions": ["accuracy"]},
        }  # fmt: skip

    with pytest.raises(ConfigError, match=r"rollout\.temperature=0.7 .* algorithm\.loss\.temperature=1\b"):
        load(tree(0.7, **both))
    load(tree(0.7, **both, loss={"temperature": 0.7}))
    only = load(tree(0.7, name="grpo", advantage={"teacher_kl": 0.1}))
    assert scoring_of(only, 9).temperature == 0.7  # who asks the teacher only this asks at the rollout's
    assert scoring_of(load({"algorithm": {"loss": {"temperature": 0.7}}}), 9).temperature == 0.7
    load(tree(0.7, reward_weight=1.0))


def test_a_horizon_cuts_what_a_steps_requests_may_sample() -> None:
    config = load({"rollout": {"n": 1, "horizon": {"start": 4, "end": 8, "steps": 2}}})
    prompts = [Prompt(0, np.array([5], np.int32), "", None)]
    limits = [requests_of(config, prompts, Scoring(), step)[0].sampling.max_tokens for step in (1, 2, 3, 9)]
    assert limits == [4, 6, 8, 8]
