"""Divergences with their gradients by formula, worked out beside the values: few passes over [..., V], few copies.

The gradients are with respect to logarithms of probabilities. Where one of those is below
:data:`gkd.losses.MIN_LOGPROB` it counts as that, and has a gradient of 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gkd.losses import MIN_LOGPROB


class _OutcomeSum(torch.autograd.Function):
    """Base of sums over outcomes; ``ctx.saved_tensors`` are the slopes of both arguments, None where none is needed."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return (*(None if saved is None else saved * slope[..., None] for saved in ctx.saved_tensors), *ctx.settings)


class KLSum(_OutcomeSum):
    """sum a (log a - log b) of two [..., V]; d / d log a = a (log a - log b + 1), d / d log b = -a."""

    @staticmethod
    def forward(ctx: Any, log_a: Tensor, log_b: Tensor) -> Tensor:
        """Return the sums, [...]."""
        bounded = log_a.clamp(min=MIN_LOGPROB)
        a = bounded.exp()
        terms = bounded.sub_(log_b.clamp(min=MIN_LOGPROB)).mul_(a)
        value = terms.sum(-1)
        first, second = ctx.needs_input_grad
        ctx.save_for_backward(
            (terms + a).masked_fill_(log_a < MIN_LOGPROB, 0.0) if first else None,
            a.neg_().masked_fill_(log_b < MIN_LOGPROB, 0.0) if second else None,
        )
        ctx.settings = ()
        return value


class JSDSum(_OutcomeSum):
    """beta KL(P||M) + (1 - beta) KL(Q||M) of two [..., V], where M = beta P + (1 - beta) Q.

    d / d log p = beta p log(p / m), d / d log q = (1 - beta) q log(q / m): what M contributes cancels.
    """

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
        """Return the sums, [...]."""
        p_terms, q_terms = log_p.clamp(min=MIN_LOGPROB), log_q.clamp(min=MIN_LOGPROB)
        # log P/M and log M/Q from the one ratio P/Q instead of from log M: next to an end one of the two is tiny, and
        # as a difference of rounded logarithms it would be noise. Past the threshold softplus(x) is taken to be x.
        log_odds = (p_terms - q_terms).add_(math.log(beta) - math.log1p(-beta))
        log_m_over_q = F.softplus(log_odds, threshold=50.0).add_(math.log1p(-beta))
        q_terms = q_terms.exp_().mul_(log_m_over_q).mul_(beta - 1.0)
        del log_m_over_q
        log_p_over_m = F.softplus(log_odds.neg_(), threshold=50.0).add_(math.log(beta)).neg_()
        p_terms = p_terms.exp_().mul_(log_p_over_m).mul_(beta)
        del log_p_over_m
        value = log_odds.copy_(p_terms).add_(q_terms).sum(-1)
        first, second, _ = ctx.needs_input_grad
        ctx.save_for_backward(
            p_terms.masked_fill_(log_p < MIN_LOGPROB, 0.0) if first else None,
            q_terms.masked_fill_(log_q < MIN_LOGPROB, 0.0) if second else None,
        )
        ctx.settings = (None,)
        return value
