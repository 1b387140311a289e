"""The generalised Jensen-Shannon divergence of GKD."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from gkd.config.base import Settings
from gkd.losses.divergence import REVERSE_KL_MAX_STALENESS, Divergence, kl

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
    logit_copies: ClassVar[int] = 7

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.max_staleness = REVERSE_KL_MAX_STALENESS if config.beta == 1.0 else None  # where it is reverse KL

    def __call__(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Compute JSD_beta of two [N, V], as [N]."""
        from gkd.losses.closed_forms import JSDSum

        beta = self.config.beta
        if beta == 0.0:
            return kl(log_p, log_q)
        if beta == 1.0:
            return kl(log_q, log_p)
        value: Tensor = JSDSum.apply(log_p, log_q, beta)  # type: ignore[no-untyped-call]
        return value
