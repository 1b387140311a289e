"""A share of 1 for every step of reasoning that the response marks as one."""

from __future__ import annotations

import re

from gkd.config import ReasoningStepsReward
from gkd.rewards.completion import Completion

_STEP = re.compile(r"^\s*(?:step\s+\d+|\d+[.)]\s|[-*]\s|(?:first|second|third|next|then|finally)\b)", re.I | re.M)


def reasoning_steps(completion: Completion, options: ReasoningStepsReward) -> float:
    """Lines that begin as a step (``Step 2``, ``3.``, a dash, ``Next``), over ``options.wanted``; at most 1."""
    return min(1.0, len(_STEP.findall(completion.response)) / options.wanted)
