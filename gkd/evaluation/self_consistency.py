"""The strategy that samples several answers and takes the one that most agree on (arXiv:2203.11171)."""

from __future__ import annotations

import asyncio

from pydantic import Field

from gkd.config.base import Settings
from gkd.evaluation.scores import final_answer
from gkd.evaluation.statistics import majority
from gkd.evaluation.strategies import Answer, Columns, GenerateFn
from gkd.rewards.comparison import is_same_answer


class SelfConsistency:
    """Majority of ``k`` samples; of answers that tie the one that was sampled first."""

    class Config(Settings):
        """Becomes ``evaluate.self_consistency``."""

        k: int = Field(5, ge=1, description="answers that are sampled for one question")
        temperature: float = Field(0.7, gt=0, le=1e3, description="temperature they are sampled at")

    def __init__(self, config: Config) -> None:
        self.config = config

    async def __call__(self, generate: GenerateFn, row: Columns) -> Answer:
        """Answer one question; its samples are drawn beside each other."""
        pending = [generate(temperature=self.config.temperature) for _ in range(self.config.k)]
        replies = await asyncio.gather(*pending)
        winners = majority([final_answer(reply.conclusion) for reply in replies], is_same_answer)
        text = replies[winners[0] if winners else 0].text
        return Answer(text, sum(reply.n_tokens for reply in replies), self.config.k)
