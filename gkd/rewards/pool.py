"""Rewards computed in parallel, in processes that can be ended when one hangs."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from concurrent.futures import Future
from typing import TypeAlias

from gkd.config import Reward
from gkd.rewards.completion import Completion
from gkd.rewards.process import RewardError, RewardProcess, Timed, finite

_Item: TypeAlias = tuple[str, Completion, Future[Timed]]

__all__ = ["RewardError", "RewardPool", "Timed", "finite"]


class RewardPool:
    """``settings.workers`` processes that evaluate reward functions, each call with a time limit.

    Those that a group of workers gives are left to it."""

    def __init__(self, settings: Reward) -> None:
        self._names = settings.scored_by(None)
        self._settings = settings
        self._waiting: deque[_Item] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._processes = [RewardProcess(settings) for _ in range(settings.workers)] if self._names else []
        self._threads = [
            threading.Thread(target=self._evaluate, args=(process,), name="reward", daemon=True)
            for process in self._processes
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # before multiprocessing, which would wait for the processes

    def submit(self, completion: Completion) -> dict[str, Future[Timed]]:
        """Start evaluating every function on one completion; never blocks. Gives rewards and how long they took.

        A future fails with RewardError when its function raises, needs longer than ``settings.timeout_s``, or when its
        process dies: that one alone.
        """
        futures: dict[str, Future[Timed]] = {name: Future() for name in self._names}
        with self._changed:
            self._waiting.extend((name, completion, future) for name, future in futures.items())
            self._changed.notify_all()
        return futures

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        atexit.unregister(self.close)
        for process in self._processes:
            process.end()
        with self._changed:
            self._closed = True  # the threads first fail what waits
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _evaluate(self, process: RewardProcess) -> None:
        """Work in turn on what waits, until the pool is closed."""
        while items := self._next():
            name, futures = items[0][0], [future for _, _, future in items]
            try:
                answers = process.evaluate(name, [completion for _, completion, _ in items], self._settings.timeout_s)
            except Exception as error:
                for future in futures:
                    future.set_exception(error)
                continue
            for future, answer in zip(futures, answers, strict=True):
                if isinstance(answer, str):
                    future.set_exception(RewardError(answer))
                else:
                    future.set_result(answer)
        process.close()

    def _next(self) -> list[_Item]:
        """Wait for what is to be evaluated next: one item, or several of one async function; none once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return []
            name = self._waiting[0][0]
            at_once = self._settings.concurrency if self._settings.is_async(name) else 1
            items = [item for item in self._waiting if item[0] == name][:at_once]
            chosen = set(map(id, items))
            self._waiting = deque(item for item in self._waiting if id(item) not in chosen)
            return items
