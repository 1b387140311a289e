"""A divergence of one's own: skew KL (DistiLLM, Ko et al., arXiv 2402.03898)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from gkd.losses import MIN_LOGPROB
from gkd.losses.divergence import Divergence, kl

if TYPE_CHECKING:
    from torch import Tensor


class SkewKL(Divergence):
    """KL(P || alpha P + (1 - alpha) Q) of teacher P and student Q.

    A share of the teacher mixed into the student bounds the loss by -log(alpha), where forward KL grows without bound.
    """

    class Config(BaseModel):
        """Becomes ``algorithm.loss.alpha``."""

        alpha: float = Field(0.1, gt=0, lt=1, description="share of the teacher in the mixture")

    config: Config

    def __call__(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Compute the value [N] at N positions from log-probabilities of the same outcomes, [N, V] of both."""
        import torch  # here, so that settings are checked without loading it

        alpha = self.config.alpha
        teacher, student = log_p.clamp(min=MIN_LOGPROB), log_q.clamp(min=MIN_LOGPROB)
        return kl(log_p, torch.logaddexp(teacher + math.log(alpha), student + math.log1p(-alpha)))
