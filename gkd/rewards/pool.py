"""Rewards computed in parallel, in processes that can be ended when one hangs."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from pebble import ProcessPool

from gkd.config import Reward
from gkd.rewards import completion
from gkd.rewards.registry import resolve

_functions: dict[str, completion.Reward] = {}  # of a pool's process


class RewardPool:
    """``settings.workers`` processes that evaluate ``settings.functions``, each call with a time limit."""

    def __init__(self, settings: Reward) -> None:
        self._names, self._timeout_s = settings.functions, settings.timeout_s
        self._pool = ProcessPool(
            max_workers=settings.workers,
            context=multiprocessing.get_context("spawn"),  # this process may have threads and a GPU
            initializer=_prepare,
            initargs=(settings.model_dump(),),
        )

    def submit(self, judged: completion.Completion) -> dict[str, Future[float]]:
        """Start evaluating every function on one completion; never blocks.

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
    _functions.update({name: resolve(name, reward) for name in reward.functions})


def _evaluate(name: str, judged: completion.Completion) -> float:
    value = float(_functions[name](judged))
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}")
    return value
