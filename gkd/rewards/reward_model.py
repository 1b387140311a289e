"""The reward ``reward_model``: a sequence classification model, in a group of its own.

It answers over ZeroMQ like the teacher (:class:`gkd.inference.requests.RateRequest`), so requests have deadlines and go
to another replica when one does not answer.
"""

from __future__ import annotations

from typing import ClassVar

from gkd.config.base import GroupName
from gkd.rewards.completion import RewardFunction


class ModelReward(RewardFunction):
    """Is given by the workers of the group ``reward_model``; its settings are that group's."""

    group: ClassVar[GroupName | None] = "reward_model"
