"""A penalty for repeated n-grams."""

from __future__ import annotations

from pydantic import Field

from gkd.config.base import Settings
from gkd.rewards.completion import Completion, RewardFunction


class RepetitionPenalty(RewardFunction):
    """Gives ``-largest`` times the share of the response's n-grams of words that occurred before; 0 at best.

    The penalty of Yeo et al., arXiv 2502.03373, as one number a response.
    """

    class Config(Settings):
        """Length of a repetition, and its weight."""

        n: int = Field(3, ge=1, description="words of an n-gram")
        largest: float = Field(1.0, gt=0, description="the penalty when nothing is new")

    config: Config

    def __call__(self, completion: Completion) -> float:
        """Return a number between ``-largest`` and 0."""
        n = self.config.n
        words = completion.response.lower().split()
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        return -self.config.largest * (1 - len(set(grams)) / len(grams)) if grams else 0.0
