"""Defines what a divergence between teacher and student is, and the arithmetic that all of them share.

P is the teacher, Q the student. The last axis runs over outcomes and is summed; whatever is before it stays. Nothing
is renormalised: where the outcomes given are not all there are, the result is the partial sum over them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gkd.config.base import Settings
from gkd.losses import MIN_LOGPROB

if TYPE_CHECKING:
    from torch import Tensor

REVERSE_KL_MAX_STALENESS = 2
"""Updates that samples may be behind before reverse KL is known to lose accuracy (AsyncOPD, arXiv 2606.24143)."""
BLOCK_CPU, BLOCK_GPU, BLOCK_ROOMY = 1 << 20, 1 << 25, 1 << 27
"""Logits that a loss works on at a time: as many as a processor's cache holds, or take little of a GPU; or keep one
busy for longer than the host takes for them."""


class Divergence(ABC):
    """Base of what ``algorithm.loss.name`` may name: the loss of every response position, with its own settings.

    A class states what it needs and costs in the attributes below, its settings in a pydantic model ``Config``, and its
    code in :meth:`__call__`. Its module imports torch inside functions alone, so that settings are checked without.
    """

    class Config(Settings):
        """No settings; those of a class of its own appear as ``algorithm.loss.NAME``."""

    teacher_logprobs: ClassVar[Literal["top_k", "token"]] = "top_k"
    """The part of a position that the teacher has to send: its ``algorithm.loss.top_k`` most likely tokens, or just the
    log-probability of the response token."""

    is_policy_gradient: ClassVar[bool] = False
    """Whether the value is an estimate from the token sampled: it then gets importance weights, the student has to have
    sampled every response, and to be compared under the very distribution that it sampled from."""

    logit_copies: ClassVar[int] = 14
    """Float32 tensors [b, V] that are alive at the worst moment of a block of b positions (:meth:`block_rows`), where
    the whole vocabulary is compared; the default is what some ten operations under autograd have."""

    max_staleness: int | None = None
    """Updates that samples may be behind before it is known to lose accuracy; None: not known of any."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @staticmethod
    def block_rows(vocabulary: int, on_cpu: bool, roomy: bool) -> int:
        """Return how many positions' logits are worked on at a time, whatever else is computed from them.

        ``roomy``: on a GPU with memory to spare (``actor.has_room``).
        """
        block = BLOCK_CPU if on_cpu else BLOCK_ROOMY if roomy else BLOCK_GPU
        return max(1, block // max(1, vocabulary))

    @abstractmethod
    def __call__(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Return the value at each of N positions, [N], differentiable in ``log_q``.

        ``log_p`` and ``log_q``, natural logarithms in one dtype, are of the same outcomes: [N, V] of the vocabulary, or
        [N, K + 1] of the teacher's K tokens and all others together, or [N, K] without these; with ``teacher_logprobs``
        "token" they are of the response tokens, [N].
        """


def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Compute KL(A||B) = sum_v a(v) (log a(v) - log b(v)) of two [..., V], as [...]; with its gradient by formula."""
    from gkd.losses.closed_forms import KLSum

    value: Tensor = KLSum.apply(log_a, log_b)  # type: ignore[no-untyped-call]
    return value


def sampled_log_ratio(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Estimate KL(Q||P) at N positions by log q(y) - log p(y) of the tokens y ~ Q sampled there, [N], detached."""
    return (log_q - log_p.clamp(min=MIN_LOGPROB)).detach()
