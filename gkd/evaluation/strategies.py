"""Strategies: how a question is answered with a model that may be asked several times.

A strategy is ``async (generate, row) -> Answer``. ``await generate()`` puts the question as its set has it, and
``await generate(prompt)`` a text or messages of the strategy's own; each returns a :class:`Reply`. ``row`` is the
question's row of the data file, by column. Questions are worked on beside each other, so a strategy only ever waits for
its own replies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from gkd.rewards.answers import with_opened_reasoning, without_reasoning
from gkd.rewards.completion import without_stop

Columns: TypeAlias = Mapping[str, Any]
"""A row of the data file."""
Messages: TypeAlias = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's reply: its text, its length in tokens, and whether the limit cut it.

    ``n_tokens`` is NaN of an endpoint that does not state it (``usage``). ``prompt``: the question's text, perhaps with
    the ``<think>`` that a chat template ends with. ``stops``: the texts that end replies, one of which it may end with.
    """

    text: str
    n_tokens: float
    truncated: bool
    prompt: str = ""
    stops: tuple[str, ...] = ()

    @property
    def conclusion(self) -> str:
        """The text without the model's reasoning, "" where the limit cut that, and without the text that ended it."""
        whole = with_opened_reasoning(self.prompt, self.text) if self.truncated else self.text
        return without_stop(without_reasoning(whole), self.stops)


@dataclass(frozen=True, slots=True)
class Answer:
    """A strategy's answer to one question.

    ``cost`` is in whatever unit the strategy counts, usually the tokens that the model wrote; ``iterations``: how often
    it looked further.
    """

    text: str
    cost: float
    iterations: int = 1


class GenerateFn(Protocol):
    """Puts a prompt to the model and waits for its reply.

    A text is put as the set puts its questions: as it is, or in place of the last message.
    """

    @property
    def question(self) -> str:
        """The text of the question, without a chat template."""

    async def __call__(
        self,
        prompt: str | Messages | None = None,
        *,
        temperature: float | None = None,
        max_response_length: int | None = None,
    ) -> Reply:
        """Return the reply; None for a prompt is the question, for a setting that of the set."""


async def plain(generate: GenerateFn, row: Columns) -> Answer:
    """Ask once and take the answer."""
    reply = await generate()
    return Answer(reply.text, reply.n_tokens)
