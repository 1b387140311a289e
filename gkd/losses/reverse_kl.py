"""Reverse KL: stay where the teacher goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from gkd.losses.divergence import REVERSE_KL_MAX_STALENESS, Divergence, kl

if TYPE_CHECKING:
    from torch import Tensor


class ReverseKL(Divergence):
    """KL(Q||P), student first: the student is to stay where the teacher goes (MiniLLM, Gu et al., arXiv 2306.08543).

    Here it is summed over the vocabulary at every position of a response, the text before it given and constant.
    """

    logit_copies: ClassVar[int] = 7
    max_staleness = REVERSE_KL_MAX_STALENESS

    def __call__(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Compute KL(Q||P) of two [N, V], as [N]."""
        return kl(log_q, log_p)
