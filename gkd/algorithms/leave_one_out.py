"""RLOO's advantages: against the mean of the others."""

from __future__ import annotations

import numpy as np

from gkd.algorithms.advantages import AdvantageEstimator, Float64


class LeaveOneOut(AdvantageEstimator):
    """``r_i`` less the mean reward of the group's other samples (RLOO; Ahmadian et al., arXiv 2402.14740).

    The baseline does not depend on the sample itself, so the policy gradient is unbiased; it is ``n / (n - 1)`` times
    the distance from the mean of all n. Where all rewards are equal, as in a group of one, advantages are 0.
    """

    def compute_advantages(self, rewards: Float64) -> Float64:
        """Return the advantages [n] of rewards [n]."""
        if (rewards == rewards[0]).all():
            return np.zeros_like(rewards)
        others = (rewards.sum() - rewards) / (len(rewards) - 1)
        advantages: Float64 = rewards - others
        return advantages
