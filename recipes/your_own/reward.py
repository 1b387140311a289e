"""A reward of one's own: answers that keep to a length."""

from __future__ import annotations

from pydantic import BaseModel, Field

from gkd.rewards.completion import Completion


class Brevity:
    """Gives 1 to responses of at most ``target_length`` tokens, and less to longer ones: half at twice as many."""

    class Config(BaseModel):
        """Becomes ``reward.Brevity.target_length``."""

        target_length: int = Field(16, ge=1, description="tokens, the end token among them")

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, completion: Completion) -> float:
        """Return the reward of a response, between 0 and 1."""
        n_tokens, target = completion.n_tokens, self.config.target_length
        return 1.0 if n_tokens <= target else target / n_tokens
