"""GRPO's advantages: against the mean of the group."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from gkd.algorithms.advantages import AdvantageEstimator, Float64
from gkd.config.base import Settings

EPSILON = 1e-4  # beside a group's standard deviation, so that nearly equal rewards do not give large advantages


class GroupMean(AdvantageEstimator):
    """``r - mean`` of the group, divided by ``std + 1e-4`` with ``divide_by_std``.

    GRPO (arXiv 2402.03300, section 4.1.2) divides; Dr. GRPO (arXiv 2503.20783) does not, since it favours questions
    whose answers are nearly all right or wrong. The deviation is the sample's (n - 1). Where all rewards are equal, as
    in a group of one, advantages are 0.
    """

    class Config(Settings):
        """Settings of the estimator."""

        divide_by_std: bool = Field(
            True,
            description="divide by the group's standard deviation (GRPO; Dr. GRPO does not; TRL: scale_rewards; "
            "verl: norm_adv_by_std_in_grpo)",
        )

    config: Config

    def compute_advantages(self, rewards: Float64) -> Float64:
        """Return the advantages [n] of rewards [n]."""
        if (rewards == rewards[0]).all():
            return np.zeros_like(rewards)  # exactly 0, where the mean of equal numbers may be off by rounding
        centred: Float64 = rewards - rewards.mean()
        if self.config.divide_by_std:
            centred /= rewards.std(ddof=1) + EPSILON
        return centred
