"""A penalty for saying the same again."""

from __future__ import annotations

from gkd.config import RepetitionReward
from gkd.rewards.completion import Completion


def repetition_penalty(completion: Completion, options: RepetitionReward) -> float:
    """``-options.largest`` times the share of the response's n-grams of words that occurred before; 0 at best.

    The penalty of Yeo et al., arXiv 2502.03373, as one number a response.
    """
    words = completion.response.lower().split()
    grams = [tuple(words[i : i + options.n]) for i in range(len(words) - options.n + 1)]
    return -options.largest * (1 - len(set(grams)) / len(grams)) if grams else 0.0
