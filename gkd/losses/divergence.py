"""Divergences between two discrete distributions given as log-probabilities, and the tail that a top K leaves out.

P is the teacher, Q the student. The last axis runs over outcomes and is summed; whatever is before it stays. Nothing
is renormalised: where the outcomes given are not all there are, the result is the partial sum over them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

MIN_LOGPROB = -1000.0
"""Log-probabilities below this, -inf among them, count as this: an outcome that one side rules out costs the other
side 1000 nats for certain instead of infinity, and no NaN reaches a gradient. Its probability is exactly 0 still."""


def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(A||B) = sum_v a(v) (log a(v) - log b(v)) of two [..., V], as [...]."""
    log_a, log_b = log_a.clamp(min=MIN_LOGPROB), log_b.clamp(min=MIN_LOGPROB)
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(P||Q), teacher first: the student is to cover all that the teacher does. [..., V] twice, as [...].

    With respect to the student's logits, its gradient is ``mass * Q - P`` where P is given and ``mass * Q`` elsewhere,
    ``mass`` being the sum of the P given: Q - P only where P is complete.
    """
    return kl(log_p, log_q)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(Q||P), student first: the student is to stay where the teacher goes. [..., V] twice, as [...]."""
    return kl(log_q, log_p)


def jsd(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Generalised Jensen-Shannon divergence of two [..., V], as [...]; forward KL at beta 0, reverse KL at beta 1.

        M = beta P + (1 - beta) Q,    JSD_beta = beta KL(P||M) + (1 - beta) KL(Q||M)

    (Agarwal et al., "On-Policy Distillation of Language Models", arXiv 2306.13649, eq. 1.) By that formula JSD is 0 at
    both ends, where M is one of the two; but JSD_beta / beta -> KL(P||Q) as beta -> 0 (M -> Q, and KL(Q||M) is of order
    beta^2) and JSD_beta / (1 - beta) -> KL(Q||P) as beta -> 1. The ends are therefore defined as those limits, so that
    no beta trains on nothing. Between the ends the value is the paper's, without a normalisation: near the ends it is
    small, about beta KL(P||Q) or (1 - beta) KL(Q||P), and it jumps to the KL at the end itself.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta is {beta}; it lies between 0 (forward KL) and 1 (reverse KL)")
    if beta == 0.0:
        return forward_kl(log_p, log_q)
    if beta == 1.0:
        return reverse_kl(log_p, log_q)
    log_p, log_q = log_p.clamp(min=MIN_LOGPROB), log_q.clamp(min=MIN_LOGPROB)
    # log P/M and log M/Q from the one ratio P/Q instead of from log M: next to an end one of the two is tiny, and as a
    # difference of rounded logarithms it would be noise. Past the threshold softplus(x) is taken to be x.
    log_odds = log_p - log_q + (math.log(beta) - math.log1p(-beta))
    log_p_over_m = -math.log(beta) - F.softplus(-log_odds, threshold=50.0)
    log_m_over_q = math.log1p(-beta) + F.softplus(log_odds, threshold=50.0)
    return (beta * log_p.exp() * log_p_over_m - (1.0 - beta) * log_q.exp() * log_m_over_q).sum(-1)


def sampled_reverse_kl(token_log_q: Tensor, token_log_p: Tensor) -> Tensor:
    """Policy-gradient surrogate of KL(Q||P) from one token y ~ Q at each position; [N] twice, as [N].

    The value is the estimate ``log q(y) - log p(y)`` (k1 in Schulman, "Approximating KL Divergence", 2020). The
    gradient is that of ``-advantage * log q(y)`` with the advantage ``-(log q(y) - log p(y))`` held constant, which in
    expectation over y is the gradient of KL(Q||P) at that position, the earlier tokens given: the derivative of
    the log q inside the estimate itself has expectation 0. The ratio q / q.detach() carries the gradient and is 1, so
    the same number serves as loss and as metric. It is for y drawn from Q; y drawn from other weights, or by an engine
    that computes otherwise, is weighted outside (:mod:`gkd.losses.off_policy`).
    """
    log_ratio = (token_log_q - token_log_p.clamp(min=MIN_LOGPROB)).detach()
    return log_ratio * (token_log_q - token_log_q.detach()).exp()


def student_tail(log_q: Tensor, ids: Tensor) -> Tensor:
    """Log-probability the student gives to everything but ``ids``; log_q [..., V] and ids [..., K], as [...].

    It is the sum over the complement, exact however small; 1 minus the mass on ``ids`` would round to 0.
    """
    # Finite rather than -inf: where the whole complement is -inf, logsumexp would have a gradient of NaN.
    return torch.logsumexp(log_q.scatter(-1, ids, torch.finfo(log_q.dtype).min / 2), -1)
