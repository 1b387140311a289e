"""Reverse KL from the sampled tokens alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from gkd.losses.divergence import REVERSE_KL_MAX_STALENESS, Divergence, sampled_log_ratio

if TYPE_CHECKING:
    from torch import Tensor


class SampledReverseKL(Divergence):
    """Policy-gradient surrogate of KL(Q||P) from one token y ~ Q at each position.

    The value is the estimate ``log q(y) - log p(y)`` (k1 in Schulman, "Approximating KL Divergence", 2020). The
    gradient is that of ``-advantage * log q(y)`` with the advantage ``-(log q(y) - log p(y))`` held constant, which in
    expectation over y is the gradient of KL(Q||P) at that position, the earlier tokens given: the derivative of
    the log q inside the estimate itself has expectation 0. The ratio q / q.detach() carries the gradient and is 1, so
    the same number serves as loss and as metric. It is for y drawn from Q; y drawn from other weights, or by an engine
    that computes otherwise, is weighted outside (:mod:`gkd.losses.off_policy`).
    """

    teacher_logprobs: ClassVar[Literal["top_k", "token"]] = "token"
    is_policy_gradient: ClassVar[bool] = True
    logit_copies: ClassVar[int] = 4
    max_staleness = REVERSE_KL_MAX_STALENESS

    def __call__(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Compute the value at N response tokens from their log-probabilities [N] under teacher and student."""
        return sampled_log_ratio(log_p, log_q) * (log_q - log_q.detach()).exp()
