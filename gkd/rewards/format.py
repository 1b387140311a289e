"""1 for a response of the wanted form."""

from __future__ import annotations

import re

from gkd.config import FormatReward
from gkd.rewards.completion import Completion


def format(completion: Completion, options: FormatReward) -> float:
    """1.0 when ``options.pattern`` is found in the response (``re.search``; a dot is also a line's end), else 0.0."""
    return float(re.search(options.pattern, completion.response, re.DOTALL) is not None)
