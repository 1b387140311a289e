"""1 for a response of the wanted form."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from gkd.config.base import Settings
from gkd.rewards.answers import with_opened_reasoning
from gkd.rewards.completion import Completion, RewardFunction


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return pattern


class Format(RewardFunction):
    """Gives 1.0 when a pattern is found in the response (``re.search``; a dot is also a line's end), else 0.0.

    A ``<think>`` that the prompt ends with, as some chat templates write it there, is part of the response.
    """

    class Config(Settings):
        """The form that is wanted."""

        pattern: Annotated[str, AfterValidator(_check_pattern)] = Field(
            r"^<think>.+</think>\s*<answer>.+</answer>\s*$",
            description="regular expression; a dot is also a line's end",
        )

    config: Config

    def __call__(self, completion: Completion) -> float:
        """Return 1.0 or 0.0."""
        response = with_opened_reasoning(completion.prompt, completion.response)
        return float(re.search(self.config.pattern, response, re.DOTALL) is not None)
