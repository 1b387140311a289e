"""Defines what turns rewards into advantages, and what else is made of rewards. Kept free of torch for the driver."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gkd.config.base import Settings

Float64 = NDArray[np.float64]


class AdvantageEstimator(ABC):
    """Base of what ``algorithm.advantage.name`` may name: how rewards become advantages, with its own settings.

    A class has its settings in a pydantic model ``Config`` and its code in :meth:`compute_advantages`; one that looks
    at several groups at once overrides :meth:`__call__`.
    """

    class Config(Settings):
        """No settings; those of a class of its own appear as ``algorithm.advantage.NAME``."""

    needs_batch: ClassVar[bool] = False
    """Whether it looks at several groups at once, so that none can be learned from before all are there. True of a
    class that overrides :meth:`__call__`, unless it states otherwise.
    """

    def __init_subclass__(cls) -> None:
        """Note whether a class overrides :meth:`__call__`, which then needs no :meth:`compute_advantages`."""
        owner = next(base for base in cls.__mro__ if vars(base).keys() & {"needs_batch", "__call__"})
        if "needs_batch" not in vars(owner):
            cls.needs_batch = True
        if cls.__call__ is not AdvantageEstimator.__call__ and cls.compute_advantages is _ABSTRACT:
            cls.compute_advantages = _compute_no_group  # type: ignore[method-assign]

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def compute_advantages(self, rewards: Float64) -> Float64:
        """Return the advantages [n] of one prompt's samples, n >= 1, from their rewards [n], which are all known."""

    def __call__(self, rewards: Sequence[float], groups: Sequence[int]) -> Float64:
        """Return the advantages [S] of a batch's samples from their rewards [S].

        Those with one number in ``groups`` [S] are of one prompt. A sample whose reward is not known (NaN) is no part
        of its group and has the advantage 0.
        """
        values, labels = np.asarray(rewards, np.float64), np.asarray(groups)
        advantages = np.zeros_like(values)
        for label in np.unique(labels):
            rewarded = (labels == label) & ~np.isnan(values)
            if rewarded.any():
                group_advantages = np.asarray(self.compute_advantages(values[rewarded]), np.float64)
                if group_advantages.shape != (rewarded.sum(),):  # a single number would be given to all
                    raise ValueError(f"compute_advantages gives {group_advantages.shape}: expected [{rewarded.sum()}]")
                advantages[rewarded] = group_advantages
        return advantages


_ABSTRACT = AdvantageEstimator.compute_advantages


def _compute_no_group(self: AdvantageEstimator, rewards: Float64) -> Float64:
    """Stand for :meth:`AdvantageEstimator.compute_advantages` in a class that overrides ``__call__`` alone."""
    raise NotImplementedError(f"{type(self).__name__} looks at all groups at once")


def groups_that_differ(rewards: Sequence[float], groups: Sequence[int]) -> set[int]:
    """Return the groups whose rewards are not all equal, from which something can be learned (DAPO, arXiv 2503.14476).

    Rewards that are not known (NaN) do not count.
    """
    distinct: dict[int, set[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        if not math.isnan(reward):
            distinct.setdefault(group, set()).add(reward)
    return {group for group, values in distinct.items() if len(values) > 1}


def overlong_penalty(n_tokens: int, max_tokens: int, buffer: int) -> float:
    """Compute DAPO's soft punishment (arXiv 2503.14476, eq. 13): 0 to ``max_tokens - buffer``, then falling to -1."""
    return min(0.0, (max_tokens - buffer - n_tokens) / buffer)
