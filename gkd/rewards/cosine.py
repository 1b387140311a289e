"""Accuracy scaled by length: short correct answers are worth most, and short wrong ones cost most."""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field

from gkd.config.base import Settings
from gkd.rewards.accuracy import accuracy
from gkd.rewards.completion import Completion, RewardFunction


class Cosine(RewardFunction):
    """Goes from the value of an empty response to that of one at the limit along half a cosine.

    Yeo et al., "Demystifying Long Chain-of-Thought Reasoning", arXiv 2502.03373, section 3.1.
    """

    class Config(Settings):
        """Values at both ends, of correct and of wrong answers."""

        correct: list[float] = Field([1.0, 0.5], min_length=2, max_length=2, description="empty, and at the limit")
        wrong: list[float] = Field([-1.0, -0.5], min_length=2, max_length=2, description="empty, and at the limit")

    needs_answer: ClassVar[bool] = True
    config: Config

    def __call__(self, completion: Completion) -> float:
        """Return the value at the response's share of the limit."""
        correct = accuracy(completion) == 1.0
        at_zero, at_limit = self.config.correct if correct else self.config.wrong
        share = min(completion.n_tokens / completion.max_tokens, 1.0)  # in this order NaN stays NaN
        return at_limit + (at_zero - at_limit) * (1 + math.cos(math.pi * share)) / 2
