"""Rewards computed in parallel, in processes that can be ended when one hangs."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeAlias

from gkd.config import Reward
from gkd.rewards.completion import Completion
from gkd.rewards.process import RewardError, RewardProcess, Timed

_RewardCall: TypeAlias = tuple[str, Sequence[Completion], list[Future[Timed]]]
"""A function, what it is to be called with, and the reward of each."""


class RewardPool:
    """``settings.workers`` processes that evaluate reward functions, each call with a time limit.

    Those that a group of workers gives are left to it. Temporary files of the processes are in ``temporary``, None for
    the usual directory of such.
    """

    def __init__(self, settings: Reward, temporary: str | None = None) -> None:
        self._names, self._of_groups = settings.functions_scored_by(None), settings.group_functions()
        self._settings = settings
        self._waiting: deque[_RewardCall] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._processes = [RewardProcess(settings, temporary) for _ in range(settings.workers if self._names else 0)]
        self._threads = [
            threading.Thread(target=self._evaluate, args=(process,), name="reward", daemon=True)
            for process in self._processes
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # a process that computes looks for nobody's end

    def submit(self, completion: Completion) -> dict[str, Future[Timed]]:
        """Start evaluating every function of single samples; never blocks. Gives rewards and how long they took.

        A future fails with RewardError when its function raises, needs longer than ``settings.timeout_s``, or when its
        process dies: that one alone.
        """
        (futures,) = self._start([completion], [name for name in self._names if name not in self._of_groups])
        return futures

    def submit_group(self, group: Sequence[Completion]) -> list[dict[str, Future[Timed]]]:
        """Start evaluating every function of whole groups on all samples of a prompt; as :meth:`submit`, for each."""
        return self._start(group, self._of_groups)

    def _start(self, group: Sequence[Completion], names: Sequence[str]) -> list[dict[str, Future[Timed]]]:
        futures: list[dict[str, Future[Timed]]] = [{name: Future() for name in names} for _ in group]
        with self._changed:
            if self._closed:  # nobody takes it any more
                for future in [future for own in futures for future in own.values()]:
                    future.set_exception(RewardError("CancelledError: the rewards are no longer computed"))
                return futures
            self._waiting.extend((name, group, [own[name] for own in futures]) for name in names)
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
        while items := self._take_waiting():
            name, futures = items[0][0], [future for _, _, its in items for future in its]
            try:
                answers = process.evaluate(name, [group for _, group, _ in items], self._settings.timeout_s)
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

    def _take_waiting(self) -> list[_RewardCall]:
        """Wait for what is to be evaluated next: one item, or several of one async function; none once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return []
            name = self._waiting[0][0]
            n_together = len(self._waiting[0][1])
            at_once = max(1, self._settings.concurrency // n_together) if self._settings.is_async(name) else 1
            if at_once == 1:
                return [self._waiting.popleft()]
            items = [item for item in self._waiting if item[0] == name][:at_once]
            chosen = set(map(id, items))
            self._waiting = deque(item for item in self._waiting if id(item) not in chosen)
            return items
