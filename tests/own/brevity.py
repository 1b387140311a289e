"""A reward of one's own, with settings: right answers count less the longer they are."""

from pydantic import BaseModel, Field

from gkd.rewards.completion import Completion


class Brevity:
    """Gives ``bonus`` times the share of the limit that a right answer leaves free."""

    class Config(BaseModel):
        bonus: float = Field(1.0, gt=0, description="reward of a right answer without a token")
        limit: int = Field(100, ge=1, description="tokens from which on there is no reward")

    needs_answer = True

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, completion: Completion) -> float:
        if completion.response.split() != (completion.answer or "").split():
            return 0.0
        return self.config.bonus * max(0.0, 1 - completion.n_tokens / self.config.limit)
