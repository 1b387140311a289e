"""Shorter is better, or as near to a wanted length as possible."""

from __future__ import annotations

from gkd.config import LengthReward
from gkd.rewards.completion import Completion


def length(completion: Completion, options: LengthReward) -> float:
    """1 at the wanted length, falling to 0 at no tokens and at twice as many; without one, from 1 to 0 at the limit."""
    if options.wanted is None:
        return 1 - completion.n_tokens / completion.max_tokens
    return max(0.0, 1 - abs(completion.n_tokens - options.wanted) / options.wanted)
