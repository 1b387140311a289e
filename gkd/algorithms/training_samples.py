"""From judged samples to what the actor learns from them. On the driver: a few numbers a sample."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gkd.algorithms.advantages import Float64, group_advantages, with_overlong
from gkd.config import Config
from gkd.errors import RunFailed
from gkd.types import Lesson, Record

log = logging.getLogger("gkd")


def groups_of(config: Config, records: Sequence[Record]) -> list[int]:
    """The group of each of a batch's records: ``rollout.n`` neighbours belong to one prompt."""
    return [position // config.rollout.n for position in range(len(records))]


def rewards_of(config: Config, records: Sequence[Record]) -> list[float]:
    """What each sample is worth: the weighted sum of its rewards, after what is said of overlong responses.

    NaN where a function that counts (its weight is not 0) gave nothing: what the sample is worth is then not known.
    """
    weights = {name: weight for name, weight in config.reward.weight_of().items() if weight}
    limit, overlong = config.rollout.max_response_length, config.algorithm.overlong

    def worth(record: Record) -> float:
        values = [weight * _number(record.rewards[name]) for name, weight in weights.items()]
        return with_overlong(record, sum(values), limit, overlong)

    return [worth(record) for record in records]


def _number(given: float | str) -> float:
    return math.nan if isinstance(given, str) else given


def lessons_of(config: Config, records: Sequence[Record]) -> tuple[list[Lesson], dict[str, float]]:
    """Lessons of a batch, ``rollout.n`` neighbours of one prompt each, and reward/* and advantage/*.

    A sample whose reward is not known has the advantage 0 and is no part of its group; where rewards are all that is
    learned from it is left out of the loss, where a teacher is as well its divergence still counts.

    Raises RunFailed when a reward function failed on more than ``reward.max_failed_share`` of the samples.
    """
    algorithm = config.algorithm
    kept = np.array([algorithm.overlong.action != "mask" or record.finish_reason != "length" for record in records])
    if not algorithm.policy_weight:
        return _lessons(records, np.zeros(len(records)), kept), {}
    metrics = _by_function(config, records)
    rewards = np.array(rewards_of(config, records))
    advantages = group_advantages(rewards.tolist(), groups_of(config, records), algorithm.advantage.divide_by_std)
    known = ~np.isnan(rewards)
    lessons = _lessons(records, advantages, kept if algorithm.distils else kept & known)
    if known.any():
        metrics |= {
            "reward/mean": float(rewards[known].mean()),
            "reward/std": float(rewards[known].std()),
            "advantage/mean": float(advantages[known].mean()),
            "advantage/std": float(advantages[known].std()),
        }
    equal = np.abs(advantages.reshape(-1, config.rollout.n)).max(1) == 0
    metrics |= {
        "reward/equal_groups": float(equal.mean()),
        "timing_s/reward": max(sum(record.reward_s.values()) for record in records),
    }
    return lessons, metrics


def _lessons(records: Sequence[Record], advantages: Float64, kept: NDArray[np.bool_]) -> list[Lesson]:
    return [
        Lesson(record, float(advantage), bool(keep))
        for record, advantage, keep in zip(records, advantages, kept, strict=True)
    ]


def _by_function(config: Config, records: Sequence[Record]) -> dict[str, float]:
    """reward/NAME/mean, /failed (a share) and /seconds a sample.

    A user's function goes by its own name, where another has the same by its module's as well.
    """
    metrics: dict[str, float] = {}
    for name, label in config.reward.labels().items():
        given = [record.rewards[name] for record in records]
        values = [value for value in given if not isinstance(value, str)]
        if values:
            metrics[f"reward/{label}/mean"] = float(np.mean(values))
        took = [record.reward_s[name] for record in records if name in record.reward_s]
        if took:
            metrics[f"reward/{label}/seconds"] = float(np.mean(took))
        metrics[f"reward/{label}/failed"] = (len(given) - len(values)) / len(given)
        if failures := _failures(config, name, given):
            log.warning(failures)
    return metrics


def require_rewards(config: Config, records: Sequence[Record]) -> None:
    """Raise RunFailed where a function failed on more than ``reward.max_failed_share`` of the records."""
    for name in config.reward.functions:
        _failures(config, name, [record.rewards[name] for record in records])


def _failures(config: Config, name: str, given: Sequence[float | str]) -> str | None:
    """On how many samples a function failed and why, in one line; None where on none. Raises as require_rewards."""
    reasons = [reason for reason in given if isinstance(reason, str)]
    if not reasons:
        return None
    found = f"reward {name} failed on {len(reasons)} of {len(given)} samples, for example: {reasons[0]}"
    if len(reasons) > config.reward.max_failed_share * len(given):
        raise RunFailed(f"{found} (reward.max_failed_share={config.reward.max_failed_share:g})")
    return found


def validation_rewards(config: Config, records: Sequence[Record]) -> dict[str, float]:
    """val/reward/NAME, each function's mean over held-out responses; val/reward/mean, that of what they are worth.

    A response for which a function that counts gave nothing is no part of the latter; val/reward/NAME/failed is the
    share of those, where there are any. Raises RunFailed as :func:`lessons_of`.
    """
    by_function = _by_function(config, records)
    found = {f"val/{name.removesuffix('/mean')}": v for name, v in by_function.items() if name.endswith("/mean")}
    found |= {f"val/{name}": share for name, share in by_function.items() if name.endswith("/failed") and share}
    counting = [name for name, weight in config.reward.weight_of().items() if weight]
    known = [record for record in records if not any(isinstance(record.rewards[name], str) for name in counting)]
    return found | ({"val/reward/mean": float(np.mean(rewards_of(config, known)))} if known else {})
