"""What a reward judges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished response as text.

    ``prompt`` is what the data file held, ``answer`` its reference answer (None without ``data.answer_key``);
    ``n_tokens`` of at most ``max_tokens`` count the end token; ``truncated``: the limit ended it.
    """

    prompt: str
    response: str
    answer: str | None
    n_tokens: int
    max_tokens: int
    truncated: bool


Reward: TypeAlias = Callable[[Completion], float]
"""A reward is a function of a completion. Larger is better; it may raise, and the sample then counts as failed."""
