"""The driver's view of the rollout engines: requests out as engines free up, samples in as they are scored."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from gkd.cluster.colocation import SLACK_S, Colocation
from gkd.cluster.failure import WorkerDied, WorkerHangs, explain
from gkd.cluster.group import Group, Pending, fetch_samples, gather
from gkd.config import Config
from gkd.errors import RunFailed
from gkd.rollout.dispatch import RequestDispatcher
from gkd.rollout.heartbeat import Heartbeat
from gkd.rollout.stream import SampleStream
from gkd.types import Generated, SampleRequest, ScoredSample, TrainingSample

log = logging.getLogger("gkd")
FETCH_TIMEOUT_S = 300.0
LOOK_EVERY_S = 1.0
DRAIN_EVERY_S = 0.02
LATE_EVERY_S = 0.05  # where samples are on their way between nodes


class RolloutGroup:
    """Hands requests to the engines as these have places free, and keeps what they finish until it is collected.

    When an engine dies while others live, what it was doing is done again by these; when none is left the run fails.
    One that hangs for ``rollout.engine_timeout_s`` is ended and counts as one that died. What an engine had finished is
    not lost: samples belong to this process and stay in the object store of their node.
    So it is with teachers and references, ``serving`` by group: their clients try another replica, and without any the
    run fails at once instead of after a deadline. ``require`` raises what else ends the run while it waits here.
    """

    def __init__(
        self,
        group: Group,
        config: Config,
        serving: Mapping[str, Pending],
        colocation: Colocation | None = None,
        followers: Sequence[Pending] = (),
        require: Callable[[], None] = lambda: None,
    ) -> None:
        self.group, self.config, self.colocation = group, config, colocation or Colocation()
        self._require = require
        # Scorers' calls, which end only when one fails, by reference: its group, and its name for messages.
        self._scorers = {
            ref: (name, worker)
            for name, calls in serving.items()
            for ref, worker in zip(calls.refs, calls.workers, strict=True)
        }
        # Parts of engines on further nodes. When one fails, its leader ends, and this is the reason.
        self._followers = {
            ref: worker for call in followers for ref, worker in zip(call.refs, call.workers, strict=True)
        }
        self.alive = list(range(len(group)))
        self._next_key = 0
        self._dispatcher = RequestDispatcher(self.alive, config.rollout.max_num_seqs, config.rollout.n)
        self._given = dict.fromkeys(self.alive, 0)  # requests so far, by engine
        self._done: dict[int, TrainingSample] = {}  # finished and not collected yet, by key
        self._serving = group.submit("serve")  # what it raises comes out of the streams
        self._streams = {i: SampleStream(group.stream(i, "finished")) for i in self.alive}
        self._heartbeat = Heartbeat(group, config.rollout.engine_timeout_s)

    def sample(self, requests: Sequence[SampleRequest], timeout_s: float) -> list[TrainingSample]:
        """Have every request sampled and scored, before what was submitted earlier and waits.

        Returns one sample a request, in the order of ``requests``. Raises as :meth:`collect`.
        """
        return self.collect(self.submit(requests), timeout_s)

    def submit(self, requests: Sequence[SampleRequest], order: int = 0) -> list[int]:
        """Queue requests for :meth:`collect`; returns their keys. Those of a lower ``order`` go to engines first."""
        self.colocation.wake_engines()
        if not len(self._dispatcher):
            self._heartbeat.begin()
        keys = list(range(self._next_key, self._next_key + len(requests)))
        self._next_key += len(requests)
        self._dispatcher.add([replace(request, key=key) for key, request in zip(keys, requests, strict=True)], order)
        self._hand_out()
        return keys

    def collect(self, keys: Sequence[int], timeout_s: float) -> list[TrainingSample]:
        """Wait until the requests of ``keys`` are sampled and scored; returns their samples in this order.

        Raises RunFailed when ``timeout_s`` is over or no engine is left.
        """
        return [sample for samples in self.in_order(keys, timeout_s) for sample in samples]

    def in_order(self, keys: Sequence[int], timeout_s: float) -> Iterator[list[TrainingSample]]:
        """Yield the samples of ``keys`` in this order, as many as are there at a time. Raises as :meth:`collect`."""
        deadline, left = time.monotonic() + timeout_s, deque(keys)
        while left:
            there: list[TrainingSample] = []
            while left and left[0] in self._done:
                there.append(self._done.pop(left.popleft()))
            if there:
                yield there
                continue
            if time.monotonic() > deadline:
                missing = sum(key not in self._done for key in left)
                raise RunFailed(self._late(f"{missing} samples were not finished and scored", timeout_s))
            self._work(deadline)

    def take(self, wait_s: float) -> list[TrainingSample]:
        """Return what is finished and not collected yet, in the order in which it came; waits ``wait_s`` for some.

        Raises RunFailed when no engine is left.
        """
        self._work(time.monotonic() + wait_s)
        taken, self._done = list(self._done.values()), {}
        return taken

    def attend(self, calls: Sequence[Any]) -> None:
        """Keep the engines at work for a second or so, or until one of ``calls`` (references) is done."""
        self._work(math.inf, calls)

    def drain(self, timeout_s: float) -> None:
        """Return once everything requested is sampled, so that new weights change none of it; scoring goes on.

        Raises RunFailed when ``timeout_s`` is over or no engine is left.
        """
        deadline = time.monotonic() + timeout_s
        while self._samples_on(timeout_s):
            if time.monotonic() > deadline:
                raise RunFailed(self._late("what was requested was not sampled", timeout_s))
            self._work(min(deadline, time.monotonic() + DRAIN_EVERY_S))

    def _samples_on(self, timeout_s: float) -> bool:
        """Return whether a request waits, or an engine has not sampled all that it was given."""
        if self._dispatcher.n_waiting:
            return True
        if not any(self._dispatcher.at_work.values()):
            return False
        sampled = self.tell("n_sampled", timeout_s=timeout_s, what="saying what is sampled")
        return bool(self._dispatcher.n_waiting) or any(n < self._given[engine] for engine, n in sampled.items())

    def _work(self, deadline: float, calls: Sequence[Any] = ()) -> None:
        """Hand requests out and take in what engines have finished, waiting a second or so for it, or for a call."""
        self._hand_out()
        for engine, samples in self._collect(deadline, calls):
            for sample in samples:
                if isinstance(sample, Generated):
                    self._dispatcher.generated(engine, sample.key)
                elif self._dispatcher.finish(engine, sample.key):
                    self._done[sample.key] = sample
        self._end_hanging()

    def _hand_out(self) -> None:
        for engine, requests in self._dispatcher.hand_out().items():
            self._given[engine] += len(requests)
            self.group.workers[engine].control.remote("submit", requests)

    def _collect(self, deadline: float, calls: Sequence[Any]) -> list[tuple[int, list[TrainingSample | Generated]]]:
        """Samples that have come within a second or so, by engine; none when one of ``calls`` was done before."""
        self._require()
        late = [engine for engine, stream in self._streams.items() if stream.is_late]
        engines = {stream.items: engine for engine, stream in self._streams.items() if not stream.is_late}
        watched = [*engines, *self._scorers, *self._followers, *calls]
        left = min(LATE_EVERY_S if late else LOOK_EVERY_S, max(0.0, deadline - time.monotonic()))
        # Arrays stay on their node until the actor wants them.
        ready: list[Any] = []
        if watched:
            ready, _ = ray.wait(watched, num_returns=1, timeout=left, fetch_local=False)
        else:
            time.sleep(left)
        for ref in ready:
            if ref in self._scorers:
                self._lose_scorer(ref)
            elif ref in self._followers:
                self._warn_of_followers()
        collected: list[tuple[int, list[TrainingSample | Generated]]] = []
        for engine in [*late, *(engines[ref] for ref in ready if ref in engines)]:
            try:
                collected.append((engine, self._next(engine)))
            except WorkerDied as failure:
                self._lose(engine, failure)
            else:
                self._streams[engine] = self._streams.pop(engine)  # the others come before it the next time
        return collected

    def _next(self, engine: int) -> list[TrainingSample | Generated]:
        """Samples that an engine has finished."""
        try:
            return self._streams[engine].take()
        except StopIteration:
            raise RunFailed(f"{self.group.reports[engine]} stopped sampling by itself") from None
        except RayError as error:
            raise self.group.explain(engine, error) from error

    def _end_hanging(self) -> None:
        """End engines that have work and do not do it."""
        limit = self.config.rollout.engine_timeout_s
        for engine in self._heartbeat.hanging([i for i in self.alive if self._dispatcher.at_work[i]]):
            who = self.group.reports[engine]
            self._lose(engine, WorkerHangs(f"{who} has done nothing for {limit:g} s (rollout.engine_timeout_s)"))

    def _late(self, what: str, timeout_s: float) -> str:
        """Return the message for what takes too long."""
        at_work = self._dispatcher.at_work
        holding = [f"{self.group.reports[i]} with {len(requests)}" for i, requests in at_work.items() if requests]
        others = f" and {len(holding) - 3} more" if len(holding) > 3 else ""
        return (
            f"{what} within {timeout_s:g} s (rollout.timeout_s); engines "
            f"alive: {len(self.alive)} of {len(self.group)}; still at work: {', '.join(holding[:3])}{others}"
        )

    def _lose(self, engine: int, failure: WorkerDied) -> None:
        self._warn_of_followers()
        self.alive.remove(engine)
        self._dispatcher.remove(engine)
        del self._streams[engine]
        if isinstance(failure, WorkerHangs):
            self.group.end(engine)
        if not self.alive:
            raise failure
        left = len(self.alive)
        log.warning("%s; its samples are done again by the other %d engines", failure, left, extra={"kind": "death"})

    def _warn_of_followers(self) -> None:
        """Name the parts of engines that have failed, which is why their leaders end."""
        if not self._followers:
            return
        failed, _ = ray.wait(list(self._followers), num_returns=len(self._followers), timeout=0)
        for serving in failed:
            worker = self._followers.pop(serving)
            try:
                ray.get(serving, timeout=FETCH_TIMEOUT_S)
            except Exception as error:
                reason = explain(error, worker)
                log.warning("%s is lost, and the engine that it is a part of with it: %s", worker, reason)

    def _lose_scorer(self, serving: Any) -> None:
        self._warn_of_followers()
        group, worker = self._scorers.pop(serving)
        try:
            ray.get(serving)
            failure: Exception = RunFailed(f"{worker} stopped serving by itself")
        except Exception as error:
            failure = explain(error, worker)
        others = sum(name == group for name, _ in self._scorers.values())
        if not others:
            raise failure
        log.warning("%s; %d others of the %s group go on", failure, others, group, extra={"kind": "death"})

    def fetch(self, samples: Sequence[TrainingSample]) -> list[ScoredSample]:
        """Return the arrays of samples. For the few that the driver looks at."""
        return fetch_samples(samples, FETCH_TIMEOUT_S)

    def sleep(self) -> None:
        """Have every living engine free its GPU."""
        self.tell("sleep", timeout_s=self.config.weights.timeout_s + SLACK_S, what="going to sleep")

    def wake(self, weights_only: bool = False) -> None:
        """Have every living engine be as before; ``weights_only``: as far as new weights need."""
        limit = self.config.weights.timeout_s + SLACK_S
        self.tell("wake", weights_only, timeout_s=limit, what="waking up")

    def tell(self, method: str, *args: Any, timeout_s: float, what: str) -> dict[int, Any]:
        """Call ``method`` of every living engine's worker; the results, by engine, without those that died of it.

        One that has not answered after ``timeout_s`` hangs, and is ended.
        Raises RunFailed when no engine is left.
        """
        engines = list(self.alive)
        call = self.group.only(engines).submit_control(method, *args, what=what)
        (results,) = gather([call], timeout_s, keep_deaths=True, keep_late=True)
        answers = dict(zip(engines, results, strict=True))
        for engine, answer in answers.items():
            if isinstance(answer, WorkerDied):
                self._lose(engine, answer)
        return {engine: answers[engine] for engine in self.alive}

    @property
    def living(self) -> Group:
        """The engines that are there."""
        return self.group.only(self.alive)
