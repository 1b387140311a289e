"""The generalised Jensen-Shannon divergence of GKD."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from gkd.config.base import Settings
from gkd.losses.divergence import MIN_LOGPROB, Divergence, kl

if TYPE_CHECKING:
    from torch import Tensor


class JSD(Divergence):
    """Generalised Jensen-Shannon divergence; forward KL at beta 0, reverse KL at beta 1.

        M = beta P + (1 - beta) Q,    JSD_beta = beta KL(P||M) + (1 - beta) KL(Q||M)

    (Agarwal et al., "On-Policy Distillation of Language Models", arXiv 2306.13649, eq. 1.) By that formula JSD is 0 at
    both ends, where M is one of the two; but JSD_beta / beta -> KL(P||Q) as beta -> 0 (M -> Q, and KL(Q||M) is of order
    beta^2) and JSD_beta / (1 - beta) -> KL(Q||P) as beta -> 1. The ends are therefore defined as those limits, so that
    no beta trains on nothing. Between the ends the value is the paper's, without a normalisation: near the ends it is
    small, about beta KL(P||Q) or (1 - beta) KL(Q||P), and it jumps to the KL at the end itself.
    """

    class Config(Settings):
        """Settings of the divergence."""

        beta: float = Field(
            0.5, ge=0, le=1, description="weight of the teacher: 0 is forward KL, 1 is reverse KL (TRL: beta)"
        )

    config: Config
    logit_copies: ClassVar[tuple[int, int]] = (13, 14)

    def __call__(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Compute JSD_beta of two [N, V], as [N]."""
        from torch.nn import functional as F

        beta = self.config.beta
        if beta == 0.0:
            return kl(log_p, log_q)
        if beta == 1.0:
            return kl(log_q, log_p)
        log_p, log_q = log_p.clamp(min=MIN_LOGPROB), log_q.clamp(min=MIN_LOGPROB)
        # log P/M and log M/Q from the one ratio P/Q instead of from log M: next to an end one of the two is tiny, and
        # as a difference of rounded logarithms it would be noise. Past the threshold softplus(x) is taken to be x.
        log_odds = log_p - log_q + (math.log(beta) - math.log1p(-beta))
        log_p_over_m = -math.log(beta) - F.softplus(-log_odds, threshold=50.0)
        log_m_over_q = math.log1p(-beta) + F.softplus(log_odds, threshold=50.0)
        return (beta * log_p.exp() * log_p_over_m - (1.0 - beta) * log_q.exp() * log_m_over_q).sum(-1)
