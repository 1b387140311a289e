"""Computes importance ratios of policy-gradient losses: one a token, or one a response (``algorithm.policy.ratio``).

A ratio is between the policy that is being updated and the one the batch's updates started from; with one update a
batch it is 1, and a surrogate's gradient is the plain policy gradient. ``bounds`` [S + 1]: where each of S sequences
begins among N response tokens laid end to end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from gkd.losses.policy_gradient import sequence_mean


class Ratio(ABC):
    """A kind of ratio, and the range that it is usually clipped to: so far below 1, and so far above."""

    usual_range: ClassVar[tuple[float, float]]

    @abstractmethod
    def log(self, log_q: Tensor, log_old: Tensor, bounds: Tensor) -> Tensor:
        """Return the log of each response token's ratio, [N], where all tokens of a response have one advantage."""

    @abstractmethod
    def log_by_token(self, log_q: Tensor, log_old: Tensor, bounds: Tensor) -> Tensor:
        """Return the same for advantages that differ from token to token."""


class TokenRatio(Ratio):
    """A ratio of its own for every token (PPO, arXiv 1707.06347; GRPO, Shao et al., arXiv 2402.03300, eq. 3)."""

    usual_range = (0.2, 0.2)

    def log(self, log_q: Tensor, log_old: Tensor, bounds: Tensor) -> Tensor:
        """Return log q - log old of each token."""
        del bounds
        return log_q - log_old

    log_by_token = log


class SequenceRatio(Ratio):
    """One ratio a response, the geometric mean of its tokens' (GSPO, Zheng et al., arXiv 2507.18071).

    A reward belongs to a whole response, so does the ratio (eq. 7): ``exp(mean over its tokens of log q - log old)``.
    Such ratios lie much nearer to 1 than tokens' do, hence the narrow range. For responses of one token it is GRPO's.
    """

    usual_range = (3e-4, 4e-4)

    def log(self, log_q: Tensor, log_old: Tensor, bounds: Tensor) -> Tensor:
        """Return the log of the response's ratio at each of its tokens."""
        return sequence_mean(log_q - log_old, bounds)

    def log_by_token(self, log_q: Tensor, log_old: Tensor, bounds: Tensor) -> Tensor:
        """Return the log of ``sg(s) q / sg(q)`` (GSPO-token, eq. 14).

        Its value is the response's ratio; its gradient is each token's own, so that a token is moved by its own
        advantage and not by the mean of its response's. Where these are equal it has GSPO's gradient.
        """
        return self.log(log_q, log_old, bounds).detach() + log_q - log_q.detach()


RATIOS: dict[str, Ratio] = {"token": TokenRatio(), "sequence": SequenceRatio()}
