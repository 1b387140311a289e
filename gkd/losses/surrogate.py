"""Defines what a policy-gradient surrogate is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from gkd.config.base import Settings

if TYPE_CHECKING:
    from torch import Tensor


class Surrogate(ABC):
    """Base of what ``algorithm.policy.surrogate`` may name: the policy-gradient loss of every sampled token.

    A class has its settings in a pydantic model ``Config`` and its code in :meth:`__call__`. All it works on is [N], so
    it costs no memory worth planning. Its module imports torch inside functions alone.

    ``usual_range``: how far below and above 1 a ratio of the kind in use is clipped unless settings give other bounds.
    """

    class Config(Settings):
        """No settings; those of a class of its own appear as ``algorithm.policy.NAME``."""

    by_token: ClassVar[bool] = False
    """Whether the loss of a token depends on nothing of other tokens. It then gets a micro-batch's tokens in parts and
    takes one pass over the logits; otherwise the tokens' log-probabilities are computed beforehand."""

    needs_reference: ClassVar[bool] = False
    """Whether a reference model is to score samples, as with ``algorithm.kl.coef`` above 0. :meth:`__call__` then gets
    its log-probabilities of the tokens, [N], as ``reference=``, a parameter of such a class' own with a default."""

    def __init__(self, config: Any, usual_range: tuple[float, float]) -> None:
        self.config, self.usual_range = config, usual_range

    @abstractmethod
    def __call__(self, log_q: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return the loss of each of N tokens, [N], to be minimised and not yet weighted.

        ``log_q`` [N]: log-probabilities of the tokens; ``ratio`` [N]: importance ratio between the policy that is being
        updated and the one the batch's updates started from; both are differentiable. ``advantages`` [N] are constant.
        """

    @abstractmethod
    def clips(self, ratio: Tensor) -> Tensor:
        """Return whether each of N ratios is outside of the range in which it counts as it is, [N] of bool."""
