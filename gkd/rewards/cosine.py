"""Accuracy scaled by length: short right answers are worth most, and short wrong ones cost most."""

from __future__ import annotations

import math

from gkd.config import CosineReward
from gkd.rewards.accuracy import accuracy
from gkd.rewards.completion import Completion


def cosine(completion: Completion, options: CosineReward) -> float:
    """From the value of an empty response to that of one at the limit along half a cosine.

    Yeo et al., "Demystifying Long Chain-of-Thought Reasoning", arXiv 2502.03373, section 3.1.
    """
    right = accuracy(completion) == 1.0
    at_zero, at_limit = options.right if right else options.wrong
    share = min(1.0, completion.n_tokens / completion.max_tokens)
    return at_limit + (at_zero - at_limit) * (1 + math.cos(math.pi * share)) / 2
