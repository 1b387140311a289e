"""Forward KL: cover all that the teacher does."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from gkd.losses.divergence import Divergence, kl

if TYPE_CHECKING:
    from torch import Tensor


class ForwardKL(Divergence):
    """KL(P||Q), teacher first: the student is to cover all that the teacher does.

    It is the loss of word-level distillation (Hinton et al., arXiv 1503.02531, at temperature 1). With respect to the
    student's logits, its gradient is ``mass * Q - P`` where P is given and ``mass * Q`` elsewhere, ``mass`` being the
    sum of the P given: Q - P only where P is complete.
    """

    logit_copies: ClassVar[int] = 7

    def __call__(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Compute KL(P||Q) of two [N, V], as [N]."""
        return kl(log_p, log_q)
