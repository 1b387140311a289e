"""Rewards computed in parallel, in processes that can be ended when one hangs."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, TypeAlias

from pebble import ProcessPool

from gkd.config import REWARD_MODEL, Reward
from gkd.rewards import completion
from gkd.rewards.registry import resolve

Timed: TypeAlias = tuple[float, float]
"""A reward, and how long it took, seconds."""

_functions: dict[str, completion.Reward] = {}  # of a pool's process


class RewardPool:
    """``settings.workers`` processes that evaluate ``settings.functions``, each call with a time limit."""

    def __init__(self, settings: Reward) -> None:
        self._names = [name for name in settings.functions if name != REWARD_MODEL]
        self._timeout_s = settings.timeout_s
        self._pool = ProcessPool(
            max_workers=settings.workers,
            context=multiprocessing.get_context("spawn"),  # this process may have threads and a GPU
            initializer=_prepare,
            initargs=(settings.model_dump(),),
        )

    def submit(self, judged: completion.Completion) -> dict[str, Future[Timed]]:
        """Start evaluating every function on one completion; never blocks. Gives rewards and how long they took.

        A future fails with whatever the function raised, and with TimeoutError past ``settings.timeout_s``.
        """
        return {
            name: self._pool.schedule(_evaluate, args=(name, judged), timeout=self._timeout_s) for name in self._names
        }

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._pool.stop()
        self._pool.join()


def _prepare(settings: Mapping[str, Any]) -> None:
    reward = Reward.model_validate(settings)
    _functions.update({name: resolve(name, reward) for name in reward.functions if name != REWARD_MODEL})


def _evaluate(name: str, judged: completion.Completion) -> Timed:
    started = time.monotonic()
    return finite(float(_functions[name](judged))), time.monotonic() - started


def finite(value: float) -> float:
    """``value``. Raises ValueError where it is not a finite number."""
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}")
    return value
