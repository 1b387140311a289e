"""What scored samples are worth, and what of them counts in the loss. On the driver: a few numbers a sample."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gkd.algorithms.advantages import AdvantageEstimator, Float64, groups_that_differ, overlong_penalty
from gkd.config import Config, Reward
from gkd.errors import RunFailed, SignalExit, describe_raised
from gkd.types import TrainingSample

log = logging.getLogger("gkd")


def groups_of(config: Config, samples: Sequence[TrainingSample]) -> list[int]:
    """Return the group of each of a batch's samples: ``rollout.n`` neighbours belong to one prompt."""
    return [position // config.rollout.n for position in range(len(samples))]


def rewards_of(config: Config, samples: Sequence[TrainingSample]) -> list[float]:
    """Return each sample's reward: the weighted sum of its functions', after ``algorithm.overlong``.

    NaN where a function that counts (its weight is not 0) gave none: the sample's reward is then not known. One that
    does not apply adds nothing.
    """
    limit, overlong = config.rollout.max_response_length, config.algorithm.overlong
    sums = _weigh_rewards(config, samples)
    if overlong.action != "penalty":
        return sums
    penalties = [overlong_penalty(sample.n_sampled, limit, overlong.buffer) for sample in samples]
    return [total + penalty for total, penalty in zip(sums, penalties, strict=True)]


def _weigh_rewards(config: Config, samples: Sequence[TrainingSample]) -> list[float]:
    weights = {name: weight for name, weight in config.reward.weight_of().items() if weight}
    return [
        sum(weight * _number(sample.rewards.get(name, 0.0)) for name, weight in weights.items()) for sample in samples
    ]


def _number(reward: float | str) -> float:
    return math.nan if isinstance(reward, str) else reward


def require_fresh(config: Config, samples: Sequence[TrainingSample], version: int) -> None:
    """Raise RunFailed, naming it, for a sample of the student's older than weights of ``version`` may learn from.

    Or newer than these are, by any of its tokens.
    """
    if config.algorithm.is_supervised:
        return
    oldest, most = min(samples, key=lambda sample: sample.version), config.schedule.max_staleness
    if (age := version - oldest.version) > most:
        raise RunFailed(
            f"{_describe(oldest)}, is of weights version {oldest.version}, {age} updates behind "
            f"(schedule.max_staleness={most})"
        )
    for sample in samples:
        if (newest := max(span.version for span in sample.versions)) > version:
            raise RunFailed(
                f"{_describe(sample)}, is of weights version {newest}, which are not there yet: these are {version}"
            )


def require_measured(samples: Sequence[TrainingSample], version: int) -> None:
    """Raise RunFailed, naming it, for a sample of a validation with a token of other weights than ``version``."""
    for sample in samples:
        if others := {span.version for span in sample.versions} - {version}:
            raise RunFailed(
                f"{_describe(sample)}, is of weights version {min(others)}, and the validation measures {version}"
            )


def _describe(sample: TrainingSample) -> str:
    return f"sample {sample.index} of prompt {sample.prompt_id}, from rollout rank {sample.worker}"


def with_advantages(
    config: Config, samples: Sequence[TrainingSample], left_out: Sequence[TrainingSample] = ()
) -> tuple[list[TrainingSample], dict[str, float]]:
    """Settle the advantages of a batch and which samples are in the loss; also returns reward/* and advantage/*.

    ``samples``: as for :func:`assign_advantages`. ``left_out``: whole groups that dynamic sampling left out of them,
    which reward/* is of as well: of the batch alone it would show what was chosen, and not what the student does.
    Raises RunFailed when a reward function failed on more than ``reward.max_failed_share`` of all of them, and as
    :func:`assign_advantages`.
    """
    if not config.algorithm.policy_weight:
        return assign_advantages(config, samples), {}
    sampled = [*samples, *left_out]
    metrics = _function_metrics(config, sampled)
    batch, rewards = assign_advantages(config, samples), np.array(rewards_of(config, sampled))
    groups, advantages, rated = groups_of(config, sampled), np.array([s.advantage for s in batch]), ~np.isnan(rewards)
    if rated.any():
        metrics |= {"reward/mean": float(rewards[rated].mean()), "reward/std": float(rewards[rated].std())}
    if (learned := rated[: len(batch)]).any():
        metrics |= {
            "advantage/mean": float(advantages[learned].mean()),
            "advantage/std": float(advantages[learned].std()),
        }
    n_groups = len(set(groups))
    metrics["reward/equal_groups"] = (n_groups - len(groups_that_differ(rewards.tolist(), groups))) / n_groups
    if config.algorithm.dynamic_sampling.max_rounds > 1:
        metrics["reward/groups"] = float(n_groups)
    if seconds := [sum(sample.reward_s.values()) for sample in sampled if sample.reward_s]:
        metrics["timing_s/reward"] = max(seconds)
    return batch, metrics


def assign_advantages(config: Config, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """Return whole groups of samples with their advantages, and whether each is in the loss.

    ``samples``: ``rollout.n`` neighbours of one prompt each. A sample whose reward is not known has the advantage 0 and
    is no part of its group; where rewards are all that is learned from it is left out of the loss, where a teacher is
    as well its divergence still counts. Raises RunFailed where ``algorithm.advantage.name`` fails.
    """
    algorithm = config.algorithm
    in_loss = np.array([algorithm.overlong.action != "mask" or sample.finish_reason != "length" for sample in samples])
    if not algorithm.policy_weight:
        return [replace(sample, in_loss=bool(keep)) for sample, keep in zip(samples, in_loss, strict=True)]
    rewards = np.array(rewards_of(config, samples))
    advantages = _advantages(config, rewards, groups_of(config, samples))
    in_loss = in_loss if algorithm.distils else in_loss & ~np.isnan(rewards)
    return [
        replace(sample, advantage=float(advantage), in_loss=bool(keep))
        for sample, advantage, keep in zip(samples, advantages, in_loss, strict=True)
    ]


def _advantages(config: Config, rewards: Float64, groups: Sequence[int]) -> Float64:
    """Return advantages [S]. Raises RunFailed where ``algorithm.advantage.name`` does not give a number for each
    sample.
    """
    name = config.algorithm.advantage.name
    estimator: AdvantageEstimator = config.algorithm.advantage.build()
    try:
        advantages = np.asarray(estimator(rewards.tolist(), groups), np.float64)
    except SignalExit:
        raise
    except (Exception, SystemExit) as error:  # it may be the user's, and may end programs
        raise RunFailed(f"algorithm.advantage.name={name}: {describe_raised(error)}") from error
    if advantages.shape != rewards.shape or not np.isfinite(advantages).all():
        raise RunFailed(
            f"algorithm.advantage.name={name} gave {advantages.shape} advantages, "
            f"{np.isfinite(advantages).sum()} of them finite: expected {rewards.shape}"
        )
    return advantages


def _function_metrics(config: Config, samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Return reward/NAME/mean, /failed (a share), /seconds a sample and, with a reference, /kl.

    A user's function goes by its own name, where another has the same by its module's as well.
    """
    metrics: dict[str, float] = {}
    for name, label in config.reward.labels().items():
        rewards = [sample.rewards.get(name) for sample in samples]
        values = [reward for reward in rewards if reward is not None and not isinstance(reward, str)]
        if values:
            metrics[f"reward/{label}/mean"] = float(np.mean(values))
        seconds = [sample.reward_s[name] for sample in samples if name in sample.reward_s]
        if seconds:
            metrics[f"reward/{label}/seconds"] = float(np.mean(seconds))
        if (kl := _kl_of_preferred(config, name, samples)) is not None:
            metrics[f"reward/{label}/kl"] = kl
        metrics[f"reward/{label}/failed"] = sum(isinstance(reward, str) for reward in rewards) / len(rewards)
        if failures := describe_failures(config.reward, name, rewards):
            log.warning(failures)
    return metrics


def _kl_of_preferred(config: Config, name: str, samples: Sequence[TrainingSample]) -> float | None:
    """Return KL(student, reference), nats a token, of the samples that a reward puts above the mean of their group.

    How far the student goes for this reward. An estimate from the sampled tokens: the mean of log p of the student less
    log p of the reference. None where no reference scored them, or the reward prefers none.
    """
    by_group: dict[int, list[tuple[float, TrainingSample]]] = {}
    for group, sample in zip(groups_of(config, samples), samples, strict=True):
        reward = _number(sample.rewards.get(name, math.nan))
        if sample.kl_reference is not None and math.isfinite(sample.kl_reference) and not math.isnan(reward):
            by_group.setdefault(group, []).append((reward, sample))
    preferred = []
    for pairs in by_group.values():
        rewards = [reward for reward, _ in pairs]
        if min(rewards) < max(rewards):  # a mean of equal numbers may be another one, by rounding
            mean = sum(rewards) / len(rewards)
            preferred += [sample for reward, sample in pairs if reward > mean]
    n_tokens = sum(sample.n_sampled for sample in preferred)
    return sum(sample.kl_reference or 0.0 for sample in preferred) / n_tokens if n_tokens else None


def describe_failures(settings: Reward, name: str, rewards: Sequence[float | str | None]) -> str | None:
    """Describe on how many samples a function failed, and why; None where on none.

    Raises RunFailed where these are more than ``reward.max_failed_share``.
    """
    reasons = [reward for reward in rewards if isinstance(reward, str)]
    if not reasons:
        return None
    line = f"reward {name} failed on {len(reasons)} of {len(rewards)} samples, for example: {reasons[0]}"
    if len(reasons) > settings.max_failed_share * len(rewards):
        raise RunFailed(f"{line} (reward.max_failed_share={settings.max_failed_share:g})")
    return line


def validation_rewards(config: Config, samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Return val/reward/NAME, each function's mean over held-out responses, and val/reward/mean, of weighted sums.

    A response to which a function that counts gave none is no part of the latter; val/reward/NAME/failed is the share
    of those, where there are any. Raises RunFailed as :func:`describe_failures`.
    """
    by_function = _function_metrics(config, samples)
    metrics = {f"val/{name.removesuffix('/mean')}": v for name, v in by_function.items() if name.endswith("/mean")}
    metrics |= {f"val/{name}": share for name, share in by_function.items() if name.endswith("/failed") and share}
    counting = [name for name, weight in config.reward.weight_of().items() if weight]
    rated = [sample for sample in samples if not any(isinstance(sample.rewards.get(name), str) for name in counting)]
    return metrics | ({"val/reward/mean": float(np.mean(_weigh_rewards(config, rated)))} if rated else {})
