"""Reward functions and the completions that they are given."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from gkd.config.base import GroupName, Settings

DOES_NOT_APPLY = object()
"""In place of the reward of a sample that a function is not for: it adds nothing to the sum, and is no failure."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished response as text.

    - ``prompt``: text of the data file, or what the chat template made of its messages.
    - ``response``: without the text that ended it, see :func:`without_stop`.
    - ``answer``: its reference answer, None where it has none; ``other_answers`` are as right.
    - ``n_tokens``, of at most ``max_tokens``: the end token included; NaN of an endpoint that does not state it.
    - ``truncated``: whether the limit ended it.
    - ``columns``: all of its row, where a reward looks at them.
    - ``messages``: what went through the chat template.
    - ``token_ids``: what was sampled, the end token included; None where only a text came, and where all rewards of a
      run are built-in ones, which do without.
    - ``step``: of ``total_steps`` optimizer steps, those that its weights had done.
    """

    prompt: str
    response: str
    answer: str | None
    n_tokens: float
    max_tokens: int
    truncated: bool
    other_answers: tuple[str, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] | None = None
    token_ids: tuple[int, ...] | None = None
    step: int = 0
    total_steps: int = 0


RewardCallable: TypeAlias = Callable[[Any], float | Sequence[float | None] | Awaitable[float | Sequence[float | None]]]
"""Gives the reward of a completion, larger for a better one, or those of a list of them, all samples of a prompt.

May raise: the samples then count as failed, as one does whose reward is None.
"""


def up_to_stop(reply: str, stops: Sequence[str]) -> str:
    """Return one reply of a model up to the first of the texts that end replies, with it.

    The token by which that text was complete may hold more, and a scorer that replies knows no such texts.
    """
    ends = [place + len(stop) for stop in stops if (place := reply.find(stop)) >= 0]
    return reply[: min(ends, default=None)]


def without_stop(text: str, stops: Sequence[str]) -> str:
    """Return a response without the text that ended it, which is no part of it unless it closes a tag or a code block.

    Engines leave that text at the end (see :func:`up_to_stop`), where a last line or number would be read, and
    endpoints do not. It stays elsewhere: a strategy may put replies together, of which each has it.
    """
    for stop in stops:
        response, _, rest = text.rpartition(stop)
        if stop in text and not stop.startswith(("</", "```")) and not rest.strip():
            return response
    return text


class RewardFunction:
    """Base of the built-in rewards, one a file; a user's class may derive from it, or be a plain function instead.

    ``needs_answer``: it compares with the reference answer, so the data must have one (``data.answer_key``).
    ``needs_columns``: it looks at ``completion.columns``.
    ``group``: the group of workers whose model gives the reward, in place of a call. ``advice_when_slow``: what to
    change where its mean time is longer than its setting ``slow_s``. ``ends_within``: its setting of the time
    after which it gives a reward, or states why there is none, by itself, which has to be below ``reward.timeout_s``.

    One that rates samples beside each other calls its parameter ``group``: it is given a list of all samples of a
    prompt and returns a list of as many rewards.

    An object is made once a process and called for every completion, in one of ``reward.workers`` processes. The file
    of a class is imported wherever settings are checked, so what is slow to import belongs into its methods.
    """

    class Config(Settings):
        """Settings in the section ``reward.NAME``: none here."""

    needs_answer: ClassVar[bool] = False
    needs_columns: ClassVar[bool] = False
    group: ClassVar[GroupName | None] = None
    advice_when_slow: ClassVar[str] = ""
    ends_within: ClassVar[str] = ""

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def required_columns(cls, config: Any) -> Mapping[str, str]:
        """Return columns that every row must have, by the setting that names each, where ``needs_columns`` is true."""
        return {}

    def __call__(self, completion: Completion) -> float | Awaitable[float]:
        """Return the reward of a completion."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__")
