"""From rewards to advantages and weights, on the driver."""

from __future__ import annotations

import logging
import math
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gkd.algorithms.advantages import groups_that_differ, overlong_penalty
from gkd.algorithms.aggregation import token_weights
from gkd.algorithms.group_mean import GroupMean
from gkd.algorithms.leave_one_out import LeaveOneOut
from gkd.algorithms.training_samples import (
    require_fresh,
    require_measured,
    rewards_of,
    validation_rewards,
    with_advantages,
)
from gkd.config import Config, Reward, load
from gkd.errors import RunFailed
from gkd.types import TrainingSample, VersionSpan
from tests.samples import training_sample

OWN = "tests.rewards.functions"


def config(**algorithm: object) -> Config:
    return load(
        {
            "algorithm": {"name": "grpo", **algorithm},
            "rollout": {"n": 2, "max_response_length": 10},
            "reward": {"functions": ["accuracy", "length"], "weights": [1.0, 0.5], "max_failed_share": 0.5},
        }
    )


def scored(
    key: int, accuracy: float | str, length: float | str = 0.0, n: int = 5, ended: str = "stop"
) -> TrainingSample:
    rewards = {"accuracy": accuracy, "length": length}
    return training_sample(key, key // 2, key % 2, n=n, finish_reason=ended, rewards=rewards)


def group_advantages(rewards: list[float], groups: list[int], divide_by_std: bool) -> np.ndarray:
    return GroupMean(GroupMean.Config(divide_by_std=divide_by_std))(rewards, groups)


def test_advantages_are_within_the_group() -> None:
    rewards, groups = [1.0, 0.0, 0.5, 3.0, 3.0, 3.0], [0, 0, 0, 1, 1, 1]
    plain = group_advantages(rewards, groups, divide_by_std=False)
    assert plain.tolist() == [0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    divided = group_advantages(rewards, groups, divide_by_std=True)
    assert divided[:3].tolist() == pytest.approx((plain[:3] / (statistics.stdev(rewards[:3]) + 1e-4)).tolist())
    assert divided[3:].tolist() == [0.0] * 3  # equal rewards: nothing to learn, and no division by zero
    assert groups_that_differ(rewards, groups) == {0}
    assert group_advantages([2.0], [0], divide_by_std=True).tolist() == [0.0]


def test_leaving_one_out_compares_with_the_others_alone() -> None:
    rewards, groups = [1.0, 0.0, 0.5, math.nan, 3.0, 3.0, 7.0], [0, 0, 0, 0, 1, 1, 2]
    advantages = LeaveOneOut(LeaveOneOut.Config())(rewards, groups).tolist()
    expected = [1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5, 0.0, 0.0, 0.0, 0.0]
    assert advantages == pytest.approx(expected)
    plain = group_advantages(rewards, groups, divide_by_std=False)
    assert advantages[:3] == pytest.approx((plain[:3] * 3 / 2).tolist())  # n / (n - 1) of the distance from the mean


@pytest.mark.parametrize("reward", [0.1, 1.2, 1 / 3])
def test_equal_rewards_that_no_binary_number_is_are_equal(reward: float) -> None:
    """The mean of three times 0.1 is not 0.1."""
    for n in range(2, 20):
        assert group_advantages([reward] * n, [0] * n, divide_by_std=True).tolist() == [0.0] * n


def test_weights_are_those_of_the_formulas() -> None:
    lengths, kept = [2, 5, 3], [True, True, False]
    assert token_weights(lengths, kept, "token_mean", 10) == [1 / 7, 1 / 7, 0.0]
    # A sample that is left out makes no other count more.
    assert token_weights(lengths, kept, "sequence_mean", 10) == [1 / 6, 1 / 15, 0.0]
    assert token_weights(lengths, kept, "constant", 10) == [1 / 30, 1 / 30, 0.0]
    for how in ("token_mean", "sequence_mean", "constant"):
        assert token_weights(lengths, [False] * 3, how, 10) == [0.0] * 3


def test_rewards_are_weighted_and_what_a_failed_one_is_worth_is_not_known() -> None:
    batch = [scored(0, 1.0, 0.5), scored(1, "TimeoutError: ", 1.0), scored(2, 1.0, "ValueError: ")]
    assert rewards_of(config(), batch) == pytest.approx([1.25, math.nan, math.nan], nan_ok=True)
    watched_only = config().model_copy(update={"reward": Reward(functions=["accuracy", "length"], weights=[1.0, 0.0])})
    assert rewards_of(watched_only, batch)[2] == 1.0  # one that counts nothing may fail


@pytest.mark.parametrize("divide", [False, True])
def test_a_failed_reward_pushes_no_other_sample(divide: bool) -> None:
    """The advantages of the others are those of the group without it."""
    known, nan = [1.0, 0.0, 0.5], math.nan
    expected = group_advantages(known, [0] * 3, divide).tolist()
    assert group_advantages([1.0, nan, 0.0, 0.5], [0] * 4, divide).tolist() == [expected[0], 0.0, *expected[1:]]
    assert group_advantages([1.0, 1.0, 1.0, nan], [0] * 4, divide).tolist() == [0.0] * 4
    assert group_advantages([nan, 3.0, nan, nan, nan], [0, 0, 0, 1, 1], divide).tolist() == [0.0] * 5
    assert groups_that_differ([1.0, nan, 1.0, 0.0, nan, nan], [0, 0, 1, 1, 2, 2]) == {1}


@pytest.mark.parametrize("name", ["grpo", "on_policy_distill"])
def test_a_sample_without_a_reward_is_left_out_of_the_loss_on_rewards(name: str) -> None:
    """A teacher's divergence needs no reward and still counts."""
    settings = config(name=name, **({"reward_weight": 1.0} if name == "on_policy_distill" else {}))
    batch = [scored(0, 1.0), scored(1, "ValueError: no"), scored(2, 1.0), scored(3, 0.0)]
    samples, metrics = with_advantages(settings, batch)
    assert [sample.in_loss for sample in samples] == [True, name == "on_policy_distill", True, True]
    assert [sample.advantage for sample in samples[:2]] == [
        0.0,
        0.0,
    ]  # the other one is alone in its group
    assert samples[2].advantage == -samples[3].advantage > 0
    assert metrics["reward/mean"] == pytest.approx(2 / 3)
    assert metrics["advantage/std"] == pytest.approx(np.std([0.0, samples[2].advantage, samples[3].advantage]))
    permissive = settings.model_copy(update={"reward": settings.reward.model_copy(update={"max_failed_share": 1.0})})
    samples, metrics = with_advantages(permissive, [scored(i, "ValueError: no") for i in range(4)])
    assert not any(sample.advantage for sample in samples)
    assert not {"reward/mean", "timing_s/reward"} & metrics.keys()  # what was not measured is left out
    assert metrics["reward/accuracy/failed"] == 1.0


def test_metrics_of_rewards_and_a_share_of_failures_that_is_allowed(caplog: pytest.LogCaptureFixture) -> None:
    batch = [scored(0, 1.0), scored(1, "ValueError: no"), scored(2, 0.0), scored(3, 0.0)]
    caplog.set_level(logging.WARNING, "gkd")
    _, metrics = with_advantages(config(), batch)
    assert metrics["reward/accuracy/mean"] == pytest.approx(1 / 3)
    assert metrics["reward/accuracy/failed"] == 0.25
    _, metrics = with_advantages(config(), [replace(own, reward_s={"length": own.key + 0.5}) for own in batch])
    assert (metrics["timing_s/reward"], metrics["reward/length/seconds"]) == (3.5, 2.0)  # the longest, and a sample
    assert metrics["reward/equal_groups"] == 1.0
    assert metrics["advantage/mean"] == pytest.approx(0.0)
    assert "1 of 4" in caplog.text
    _, metrics = with_advantages(config(), [scored(i, reward) for i, reward in enumerate([1.0, 0.0, 0.0, 0.0])])
    assert metrics["reward/equal_groups"] == 0.5


def test_a_function_that_does_not_apply_to_a_sample_adds_nothing_and_is_no_failure() -> None:
    """As TRL has it of None, for rewards of several tasks."""
    settings = config()
    rewards: list[dict[str, float | str]] = [{"accuracy": 1.0, "length": 1.0}, {"accuracy": 0.0}, {"length": 0.5}, {}]
    samples = [training_sample(i, i // 2, i % 2, rewards=own) for i, own in enumerate(rewards)]
    batch, metrics = with_advantages(settings, samples)
    assert rewards_of(settings, samples) == [1.5, 0.0, 0.25, 0.0]
    assert [sample.in_loss for sample in batch] == [True] * 4
    assert (metrics["reward/accuracy/mean"], metrics["reward/length/mean"]) == (0.5, 0.75)
    assert (metrics["reward/accuracy/failed"], metrics["reward/length/failed"]) == (0.0, 0.0)
    assert validation_rewards(settings, samples)["val/reward/mean"] == 1.75 / 4


def test_held_out_rewards_are_compared_without_the_penalty_for_length() -> None:
    settings = config(overlong={"action": "penalty", "buffer": 10})
    samples = [scored(0, 1.0)]
    assert rewards_of(settings, samples)[0] < 1.0
    assert validation_rewards(settings, samples) == {
        "val/reward/accuracy": 1.0,
        "val/reward/length": 0.0,
        "val/reward/mean": 1.0,
    }


def test_a_sample_is_as_old_as_its_oldest_token_and_as_new_as_its_newest() -> None:
    """As of weights that came while it was sampled."""
    settings = Config.model_validate({"schedule": {"max_staleness": 1, "in_flight": True}})
    sample = replace(scored(0, 1.0), versions=(VersionSpan(4, 6, 4), VersionSpan(6, 9, 5)))
    require_fresh(settings, [sample], 5)
    with pytest.raises(RunFailed, match=r"version 5\b.* 4$"):
        require_fresh(settings, [sample], 4)
    with pytest.raises(RunFailed, match=r"version 4, 2 updates"):
        require_fresh(settings, [sample], 6)


def test_a_validation_measures_one_version_in_every_token() -> None:
    sample = replace(scored(0, 1.0), versions=(VersionSpan(4, 6, 5), VersionSpan(6, 9, 5)))
    require_measured([sample], 5)
    for other in (4, 6):
        mixed = replace(sample, versions=(VersionSpan(4, 6, 5), VersionSpan(6, 9, other)))
        with pytest.raises(RunFailed, match=rf"version {other}\b.* 5$"):
            require_measured([sample, mixed], 5)


def test_how_far_the_student_goes_for_each_reward() -> None:
    """KL a token of the samples that a reward puts above their group's mean, whichever those are."""
    rewards = [(1.0, 0.0), (0.0, 1.0), (0.5, 0.2), ("ValueError: no", 0.4)]  # of two groups
    batch = [
        replace(scored(i, *marks, n=n), kl_reference=kl)
        for i, (marks, n, kl) in enumerate(zip(rewards, (4, 5, 6, 10), (0.4, 1.0, 6.0, 3.0), strict=True))
    ]
    _, metrics = with_advantages(config(), batch)
    assert metrics["reward/accuracy/kl"] == pytest.approx(
        0.4 / 4
    )  # the third is the only one of its group with a reward
    assert metrics["reward/length/kl"] == pytest.approx((1.0 + 3.0) / (5 + 10))
    of_three = config().model_copy(update={"rollout": config().rollout.model_copy(update={"n": 3})})
    spread = [replace(scored(i, reward), kl_reference=kl) for i, (reward, kl) in enumerate([(0, 1), (0.5, 2), (1, 4)])]
    assert with_advantages(of_three, spread)[1]["reward/accuracy/kl"] == pytest.approx(4 / 5)  # one is the mean itself
    equal = [replace(scored(i, 0.7, 0.7), kl_reference=1.0) for i in range(3)]  # their mean is 0.7 less a bit
    assert not any(name.endswith("/kl") for name in with_advantages(of_three, equal)[1])
    unknown = [replace(sample, kl_reference=None) for sample in batch]
    assert not any(name.endswith("/kl") for name in with_advantages(config(), unknown)[1])


def test_rewards_of_one_name_are_logged_by_themselves() -> None:
    settings = config().model_copy(update={"reward": Reward(functions=["accuracy", f"{OWN}:accuracy", f"{OWN}:words"])})
    rewards = {"accuracy": 1.0, f"{OWN}:accuracy": 0.0, f"{OWN}:words": 0.5}
    _, metrics = with_advantages(settings, [training_sample(i, 0, i, rewards=rewards) for i in range(2)])
    assert metrics["reward/accuracy/mean"] == 1.0
    assert metrics[f"reward/{OWN}:accuracy/mean"] == 0.0
    assert metrics["reward/words/mean"] == 0.5


def test_rewards_are_of_all_samples_and_advantages_of_those_that_are_learned_from() -> None:
    """Of the groups that dynamic sampling keeps, rewards are about a half whatever the student has learned."""
    settings = config(dynamic_sampling={"max_rounds": 3})
    batch = [scored(0, 1.0), scored(1, 0.0)]
    left_out = [scored(i, 1.0 if i < 6 else "ValueError: no") for i in range(2, 8)]
    left_out = [replace(own, reward_s={"accuracy": 0.25 * own.key}) for own in left_out]
    samples, metrics = with_advantages(settings.with_settings({"reward.max_failed_share": 0.25}), batch, left_out)
    assert [sample.key for sample in samples] == [0, 1]
    assert metrics["reward/mean"] == pytest.approx(5 / 6) and metrics["reward/accuracy/failed"] == 0.25
    assert (metrics["reward/equal_groups"], metrics["reward/groups"]) == (0.75, 4.0)
    assert metrics["advantage/std"] == pytest.approx(abs(samples[0].advantage)) and metrics["timing_s/reward"] == 1.75
    with pytest.raises(RunFailed, match=r"\b2 of 8\b"):
        with_advantages(settings.with_settings({"reward.max_failed_share": 0.24}), batch, left_out)
    assert "reward/groups" not in with_advantages(config(), batch)[1]


def test_too_many_failures_end_the_run() -> None:
    batch = [scored(i, "ValueError: no" if i else 1.0) for i in range(4)]
    with pytest.raises(RunFailed, match=r"reward accuracy .*\b3 of 4\b.*ValueError: no"):
        with_advantages(config(), batch)


def test_overlong_responses() -> None:
    assert [overlong_penalty(n, 10, 4) for n in (3, 6, 8, 10)] == [0.0, 0.0, -0.5, -1.0]
    batch = [scored(0, 1.0, n=10, ended="length"), scored(1, 0.0, n=6)]
    assert [sample.in_loss for sample in with_advantages(config(overlong={"action": "mask"}), batch)[0]] == [
        False,
        True,
    ]
    assert all(sample.in_loss for sample in with_advantages(config(), batch)[0])
    assert rewards_of(config(overlong={"action": "penalty", "buffer": 4}), batch) == [0.0, 0.0]


def test_distillation_asks_no_rewards() -> None:
    samples, metrics = with_advantages(Config(), [training_sample()])
    assert metrics == {}
    assert (samples[0].advantage, samples[0].in_loss) == (0.0, True)
    assert np.isfinite(samples[0].advantage)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("return rewards.mean()", r"compute_advantages gives \(\)"),
        ("pass", r"compute_advantages gives \(\)"),
        ("return rewards[:1]", r"compute_advantages gives \(1,\)"),
        ("raise SystemExit(0)", r"SystemExit: "),
        ("return rewards / self.scale", r"AttributeError: .*own\.py, line 4\)"),
    ],
)
def test_an_estimator_of_ones_own_that_will_not_do_is_named(code: str, message: str, tmp_path: Path) -> None:
    base = "from gkd.algorithms.advantages import AdvantageEstimator\n"
    method = f"    def compute_advantages(self, rewards):\n        {code}\n"
    (tmp_path / "own.py").write_text(f"{base}class Own(AdvantageEstimator):\n{method}")
    samples = [scored(0, 1.0), scored(1, 0.0)]
    with pytest.raises(RunFailed, match=rf"algorithm\.advantage\.name=.*own\.py:Own: .*{message}"):
        with_advantages(config(advantage={"name": f"{tmp_path}/own.py:Own"}), samples)
