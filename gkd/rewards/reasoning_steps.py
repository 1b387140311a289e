"""A share of 1 for every step of reasoning that the response marks as one."""

from __future__ import annotations

import re

from pydantic import Field

from gkd.config.base import Settings
from gkd.rewards.completion import Completion, RewardFunction

_STEP = re.compile(r"^[^\S\n]*(?:step\s+\d+|\d+[.)]\s|[-*]\s|(?:first|second|third|next|then|finally)\b)", re.I | re.M)


class ReasoningSteps(RewardFunction):
    """Counts lines that begin as a step: ``Step 2``, ``3.``, a dash, ``Next``."""

    class Config(Settings):
        """Number of steps that are enough."""

        n_steps: int = Field(3, ge=1, description="steps that give the full reward")

    config: Config

    def __call__(self, completion: Completion) -> float:
        """Return the steps over ``n_steps``; at most 1."""
        return min(1.0, len(_STEP.findall(completion.response)) / self.config.n_steps)
