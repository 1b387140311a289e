"""From rewards to advantages, within the group of one prompt's samples. Kept free of torch for the driver."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gkd.config import Overlong
from gkd.types import TrainingSample

EPSILON = 1e-4  # beside a group's standard deviation, so that equal rewards give 0 and not noise

Float64 = NDArray[np.float64]


def group_advantages(rewards: Sequence[float], groups: Sequence[int], divide_by_std: bool) -> Float64:
    """Advantage of every sample against the others of its group: ``r - mean``, divided by ``std + 1e-4`` if asked.

    GRPO (arXiv 2402.03300, section 4.1.2) divides; Dr. GRPO (arXiv 2503.20783) does not, since it favours questions
    whose answers are nearly all right or wrong. The deviation is the sample's (n - 1). ``rewards`` and ``groups`` [S];
    returns [S]. A sample whose reward is not known (NaN) is none of the group's; it and a group of one have 0.
    """
    values, labels = np.asarray(rewards, np.float64), np.asarray(groups)
    found = np.zeros_like(values)
    for label in np.unique(labels):
        own = (labels == label) & ~np.isnan(values)
        if (values[own] == values[own][:1]).all():
            continue  # exactly 0, where the mean of equal numbers may be off by rounding
        centred = values[own] - values[own].mean()
        if divide_by_std:
            centred /= values[own].std(ddof=1) + EPSILON
        found[own] = centred
    return found


def groups_that_differ(rewards: Sequence[float], groups: Sequence[int]) -> set[int]:
    """Groups whose rewards are not all equal, from which something can be learned (DAPO, arXiv 2503.14476).

    Rewards that are not known (NaN) do not count.
    """
    seen: dict[int, set[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        if not math.isnan(reward):
            seen.setdefault(group, set()).add(reward)
    return {group for group, values in seen.items() if len(values) > 1}


def overlong_penalty(n_tokens: int, max_tokens: int, buffer: int) -> float:
    """DAPO's soft punishment (arXiv 2503.14476, eq. 13): 0 up to ``max_tokens - buffer``, then falling to -1."""
    return min(0.0, (max_tokens - buffer - n_tokens) / buffer)


def with_overlong(sample: TrainingSample, reward: float, max_tokens: int, overlong: Overlong) -> float:
    """A sample's reward after what ``algorithm.overlong`` says of its length."""
    if overlong.action != "penalty":
        return reward
    return reward + overlong_penalty(sample.n_sampled, max_tokens, overlong.buffer)
