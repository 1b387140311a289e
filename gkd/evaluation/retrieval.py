"""Strategies that look further before they answer: as long as the model wants to, or always so many times.

What there is to look at are the passages in a column of the row, one a step, in their order; where there are none, the
model's own thoughts so far.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import Field

from gkd.config.base import Settings
from gkd.evaluation.strategies import Answer, Columns, GenerateFn

MORE = re.compile(r"\W*MORE\b\W*")
"""How a reply begins that wants to look further."""


class Retrieval:
    """Base of both strategies: the passages of a row, and a question together with what was seen."""

    class Config(Settings):
        """Becomes ``evaluate.adaptive`` and ``evaluate.fixed_k``."""

        k: int = Field(3, ge=1, description="steps: at most (adaptive), always (fixed_k)")
        documents_key: str = Field("documents", description="column with a list of passages to look at, one a step")

    def __init__(self, config: Config) -> None:
        self.config = config

    def _passages(self, row: Columns) -> list[str] | None:
        """Return the passages of a row, None where it has no such column. Raises ValueError for what are none."""
        passages = row.get(self.config.documents_key)
        if passages is None:
            return None
        if not isinstance(passages, Sequence) or isinstance(passages, str):
            raise ValueError(f"the column {self.config.documents_key} holds no list of passages")
        return [str(passage) for passage in passages]

    @staticmethod
    def _prompt(question: str, passages: Sequence[str], task: str) -> str:
        notes = "".join(f"\n\n[{number}] {text.strip()}" for number, text in enumerate(passages, start=1))
        return f"{question}{notes}\n\n{task}"


class AdaptiveRetrieval(Retrieval):
    """At each step the model decides whether to look further or to answer, at most ``k`` times."""

    async def __call__(self, generate: GenerateFn, row: Columns) -> Answer:
        """Answer one question; ``iterations`` counts how often the model was asked."""
        passages, notes, cost = self._passages(row), list[str](), 0.0
        most = self.config.k if passages is None else min(self.config.k, len(passages))
        further = "think further, then your next thought" if passages is None else "another passage, and nothing else"
        for step in range(most):
            task = f"Reply with the answer, or with MORE if you need {further}."
            reply = await generate(self._prompt(generate.question, notes, task))
            cost += reply.n_tokens
            request = MORE.match(reply.conclusion)
            if request is None:
                return Answer(reply.text, cost, step + 1)
            notes.append(reply.conclusion[request.end() :] if passages is None else passages[step])
        reply = await generate(self._prompt(generate.question, notes, "Reply with the answer."))
        return Answer(reply.text, cost + reply.n_tokens, most + 1)


class FixedRetrieval(Retrieval):
    """Takes ``k`` steps, each with a note of the model on what it looks at, and then answers."""

    async def __call__(self, generate: GenerateFn, row: Columns) -> Answer:
        """Answer one question; ``iterations`` counts how often the model was asked."""
        passages, notes, cost = self._passages(row), list[str](), 0.0
        for step in range(self.config.k):
            passage = [] if passages is None or step >= len(passages) else [passages[step]]
            task = "Note in a sentence what helps with the answer." if passage else "Think one step further."
            reply = await generate(self._prompt(generate.question, [*notes, *passage], task))
            cost += reply.n_tokens
            notes += [*passage, reply.conclusion]
        reply = await generate(self._prompt(generate.question, notes, "Reply with the answer."))
        return Answer(reply.text, cost + reply.n_tokens, self.config.k + 1)
