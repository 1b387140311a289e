"""Shorter is better, or as near to a target length as possible."""

from __future__ import annotations

from pydantic import Field

from gkd.config.base import Settings
from gkd.rewards.completion import Completion, RewardFunction


class Length(RewardFunction):
    """Gives 1 at the target length, falling to 0 at no tokens and at twice as many.

    Without a target length it falls from 1 at no tokens to 0 at the limit.
    """

    class Config(Settings):
        """The length that gives 1."""

        target_length: int | None = Field(None, ge=1, description="tokens that give 1; null: the fewer the better")

    config: Config

    def __call__(self, completion: Completion) -> float:
        """Return a number between 0 and 1."""
        target = self.config.target_length
        if target is None:
            return 1 - completion.n_tokens / completion.max_tokens
        return max(1 - abs(completion.n_tokens - target) / target, 0.0)  # in this order NaN stays NaN
