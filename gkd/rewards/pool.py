"""Rewards computed in parallel, in processes that can be ended when one hangs."""

from __future__ import annotations

import atexit
import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count

from gkd.config import Reward
from gkd.config.base import LONGEST_S
from gkd.rewards.completion import Completion
from gkd.rewards.process import RewardError, RewardProcess, Timed

LOOK_S = 0.02
"""Time after which a process that could do more is looked at again for what waits by then."""


@dataclass(frozen=True, eq=False)
class RewardCall:
    """A function, what it is to be called with, and the reward of each; ``number`` counts calls as they were asked
    for.
    """

    number: int
    name: str
    group: Sequence[Completion]
    futures: Sequence[Future[Timed]]

    def fail(self, error: Exception) -> None:
        """Have all its rewards fail."""
        for future in self.futures:
            future.set_exception(error)


class RewardPool:
    """``settings.workers`` processes that evaluate reward functions, each call with a time limit.

    Those that a group of workers gives are left to it. Temporary files of the processes are in ``temporary``, None for
    the usual directory of such.
    """

    def __init__(self, settings: Reward, temporary: str | None = None) -> None:
        self._names, self._of_groups = settings.functions_scored_by(None), settings.group_functions()
        self._settings = settings
        self._numbers = count()
        self._waiting: dict[str, deque[RewardCall]] = {name: deque() for name in self._names}
        self._n_at_work: Counter[str] = Counter()  # processes, by the function that they evaluate
        self._turning: RewardProcess | None = None
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
                for future in [future for sample_futures in futures for future in sample_futures.values()]:
                    future.set_exception(RewardError("CancelledError: the rewards are no longer computed"))
                return futures
            for name in names:
                self._waiting[name].append(
                    RewardCall(next(self._numbers), name, group, [sample_futures[name] for sample_futures in futures])
                )
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
        name = None
        while call := self._take_next(process, name):
            name = call.name
            self._evaluate_function(process, call)
        process.close()

    def _evaluate_function(self, process: RewardProcess, call: RewardCall | None) -> None:
        """Have a process evaluate ``call``, and further ones of its function while some are under way."""
        under_way: dict[int, RewardCall] = {}
        n_started = 0
        while call is not None or under_way:
            if call is not None:
                try:
                    process.send(call.number, call.name, call.group, self._settings.timeout_s)
                    under_way[call.number] = call
                    n_started += len(call.group)
                except Exception as error:
                    call.fail(error)
            else:
                self._receive(process, under_way)
            call = self._take_further(process, list(under_way.values()), n_started)

    def _receive(self, process: RewardProcess, under_way: dict[int, RewardCall]) -> None:
        """Give what has come of the calls under way to those who wait for it."""
        try:
            name = next(iter(under_way.values())).name
            answer = process.receive(LOOK_S if self._settings.is_async(name) else LONGEST_S)
        except Exception as error:
            for call in under_way.values():
                call.fail(error)
            under_way.clear()
            return
        if answer is None:
            return
        number, rewards = answer
        for future, reward in zip(under_way.pop(number).futures, rewards, strict=True):
            if isinstance(reward, str):
                future.set_exception(RewardError(reward))
            else:
                future.set_result(reward)

    def _take_next(self, process: RewardProcess, evaluated: str | None) -> RewardCall | None:
        """Wait for what a process that has evaluated ``evaluated`` is to evaluate next; None once closed.

        That is of the function which the fewest work at, so that one that many wait for holds up no other.
        """
        with self._changed:
            if evaluated is not None:
                self._n_at_work[evaluated] -= 1
            if self._turning is process:
                self._turning = None
            self._changed.wait_for(lambda: any(self._waiting.values()) or self._closed)
            heads = [calls[0] for calls in self._waiting.values() if calls]
            if not heads:
                return None
            name = min(heads, key=lambda call: (self._n_at_work[call.name], call.number)).name
            self._n_at_work[name] += 1
            return self._waiting[name].popleft()

    def _take_further(
        self, process: RewardProcess, under_way: Sequence[RewardCall], n_started: int
    ) -> RewardCall | None:
        """Return what a process may evaluate beside what it has ``under_way``; None for nothing.

        That is more of an async function, up to ``reward.concurrency`` samples. Where nobody evaluates a function that
        is waited for, the process that has begun as many turns to that one.
        """
        if not under_way or not self._settings.is_async(name := under_way[0].name):
            return None
        with self._changed:
            n_samples, waiting = sum(len(call.group) for call in under_way), self._waiting[name]
            if not waiting or n_samples + len(waiting[0].group) > self._settings.concurrency:
                return None
            if n_started >= self._settings.concurrency and self._is_to_turn(name):
                self._turning = process
            return None if self._turning is process else waiting.popleft()

    def _is_to_turn(self, name: str) -> bool:
        """Return whether one of those who evaluate ``name`` is to turn to what nobody evaluates."""
        others = [other for other in self._names if other != name]
        if self._turning is not None or any(
            self._n_at_work[other] and not self._settings.is_async(other) for other in others
        ):
            return False  # one that evaluates single calls comes round to it
        return any(self._waiting[other] and not self._n_at_work[other] for other in others)
