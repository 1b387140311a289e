"""Rewards computed in parallel, in processes that can be ended when one hangs."""

from __future__ import annotations

import atexit
import threading
from concurrent.futures import Future
from queue import SimpleQueue

from gkd.config import Reward
from gkd.rewards.completion import Completion
from gkd.rewards.process import RewardError, RewardProcess, Timed, finite

__all__ = ["RewardError", "RewardPool", "Timed", "finite"]


class RewardPool:
    """``settings.workers`` processes that evaluate reward functions, each call with a time limit.

    Those that a group of workers gives are left to it."""

    def __init__(self, settings: Reward) -> None:
        self._names = settings.scored_by(None)
        self._timeout_s = settings.timeout_s
        self._waiting: SimpleQueue[tuple[str, Completion, Future[Timed]] | None] = SimpleQueue()
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
        for name, future in futures.items():
            self._waiting.put((name, completion, future))
        return futures

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        atexit.unregister(self.close)
        for process in self._processes:
            process.end()
        for _ in self._threads:  # which first fail what waits
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _evaluate(self, process: RewardProcess) -> None:
        """Work in turn on what waits, until the pool is closed."""
        while (item := self._waiting.get()) is not None:
            name, completion, future = item
            try:
                future.set_result(process.evaluate(name, completion, self._timeout_s))
            except Exception as error:
                future.set_exception(error)
        process.close()
