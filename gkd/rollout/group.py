"""The driver's view of the rollout engines: requests out as engines free up, samples in as they are scored."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gkd.cluster.health.fleet import Health, HealthEvent
from gkd.cluster.health.queues import EngineQueue, QueueFile, Queues
from gkd.cluster.health.watched import RestartPolicy
from gkd.cluster.workers.colocation import SLACK_S, Colocation
from gkd.cluster.workers.deadline import Deadline
from gkd.cluster.workers.failure import WorkerDied
from gkd.cluster.workers.group import Group, PendingCall, fetch_samples, gather
from gkd.config import Config
from gkd.errors import RunFailed
from gkd.rollout.dispatch import RequestDispatcher
from gkd.rollout.engine_group import FETCH_TIMEOUT_S, EngineGroup
from gkd.scoring.client import ScoringClient
from gkd.scoring.watch import ScorerWatch
from gkd.types import GenerationNotice, SampleRequest, ScoredSample, TrainingSample

log = logging.getLogger("gkd")


class RolloutGroup:
    """Hands requests to the engines as these have places free, and keeps what they finish until it is collected.

    When an engine dies, what it was doing is done again by the others, or waits. It is started again by
    ``restart_policy``, gets the current weights from ``refresh``, and takes part once it has them; when none is left or
    comes back the run fails. One that hangs for ``rollout.engine_timeout_s`` is ended and counts as one that died.
    What an engine had finished is not lost: samples belong to this process and stay in the object store of their node,
    and where that has left, those that are not collected are sampled again.
    ``scorers`` are watched meanwhile, for the engines and for ``clients`` of this process, by model. ``require`` raises
    what else ends the run while it waits here.
    """

    def __init__(
        self,
        group: Group,
        config: Config,
        scorers: ScorerWatch | None = None,
        colocation: Colocation | None = None,
        followers: Sequence[PendingCall] = (),
        require: Callable[[], None] = lambda: None,
        restart_policy: RestartPolicy | None = None,
        clients: Mapping[str, ScoringClient] | None = None,
    ) -> None:
        self.config, self.colocation, self._require = config, colocation or Colocation(), require
        limit = config.rollout.engine_timeout_s
        self.engines = EngineGroup(group, limit, scorers or ScorerWatch([]), followers, restart_policy, clients or {})
        self.queue_file: QueueFile | None = None
        """Where the engines' queues are shown; None: nowhere."""
        self.refresh: Callable[[Sequence[int]], None] | None = None
        """What sends the actor's weights to these engines, up to :meth:`mark_updated`; None: nothing does."""
        self.version = 0
        """Of the weights, at least, that what is submitted from now on is sampled from."""
        self._next_key = 0
        spill = None if config.has_group_rewards else config.rollout.n
        self._dispatcher = RequestDispatcher(
            self.working_engines, config.rollout.slots, spill, apart=config.schedule.max_staleness == 0
        )
        self._done: dict[int, TrainingSample] = {}  # finished and not collected yet, by key
        self._requests: dict[int, SampleRequest] = {}  # all that is not collected, by key
        self._progressed = -math.inf  # when something was last sampled or scored, time.monotonic

    @property
    def group(self) -> Group:
        """The engines' workers, those of engines that died included."""
        return self.engines.group

    @property
    def working_engines(self) -> list[int]:
        """The engines that sample."""
        return self.engines.fleet.working

    @property
    def present_engines(self) -> list[int]:
        """The engines whose process is there, those included that have yet to get weights."""
        return self.engines.fleet.present

    def submit(self, requests: Sequence[SampleRequest], order: float = 0) -> list[int]:
        """Queue requests for :meth:`collect`; returns their keys. Those of a lower ``order`` go to engines first.

        Where all samples of a step are of the same weights (staleness 0) those of a higher one are not sampled beside
        them: equal seeds then give equal runs, validated or not.
        """
        self.colocation.wake_engines()
        if not len(self._dispatcher):
            self.engines.heartbeat.begin()
        keys = list(range(self._next_key, self._next_key + len(requests)))
        self._next_key += len(requests)
        keyed = [
            replace(request, key=key, order=order, version=self.version)
            for key, request in zip(keys, requests, strict=True)
        ]
        self._requests |= {request.key: request for request in keyed}
        self._dispatcher.add(keyed)
        self._hand_out()
        return keys

    def collect(self, keys: Sequence[int], timeout_s: float) -> list[TrainingSample]:
        """Wait until the requests of ``keys`` are sampled and scored; returns their samples in this order.

        Raises RunFailed when nothing is sampled or scored for ``timeout_s``, or no engine is left and none comes back.
        """
        return [sample for samples in self.collect_in_order(keys, timeout_s) for sample in samples]

    def collect_in_order(self, keys: Sequence[int], timeout_s: float) -> Iterator[list[TrainingSample]]:
        """Yield the samples of ``keys`` in this order, as many as are there at a time: none, at first, where none is.

        Raises as :meth:`collect`; ``timeout_s`` is for what is waited here.
        """
        self._sample_lost_again()
        deadline, remaining, began = Deadline(timeout_s, self._measure_idle), deque(keys), False
        while remaining:
            finished: list[TrainingSample] = []
            while remaining and remaining[0] in self._done:
                finished.append(self._hand_over(remaining.popleft()))
            if finished or not began:
                began = True
                yield finished
                deadline = Deadline(timeout_s, self._measure_idle)  # what is done with them is no waiting
                continue
            self._refresh()
            if deadline.is_over():
                missing = sum(key not in self._done for key in remaining)
                raise RunFailed(self._describe_delay(f"{missing} samples are not finished and scored", timeout_s))
            self._work(deadline.end)

    def take(self, wait_s: float) -> list[TrainingSample]:
        """Return what is finished and not collected yet, in the order in which it came; waits ``wait_s`` for some.

        Raises RunFailed when no engine is left.
        """
        self._work(time.monotonic() + wait_s)
        return [self._hand_over(key) for key in list(self._done)]

    def _hand_over(self, key: int) -> TrainingSample:
        del self._requests[key]
        return self._done.pop(key)

    def attend(self, calls: Sequence[Any] = (), wait_s: float = math.inf) -> None:
        """Keep the engines at work for a second or so, ``wait_s`` at most, or until a call (reference) is done."""
        self._work(time.monotonic() + wait_s, calls)

    def drain(self, timeout_s: float, together: bool = False) -> list[int]:
        """Return engines whose weights are older than :attr:`version`, and that have sampled what these were for.

        Waits until there is one; ``together``: until all are. Samples are scored meanwhile, and later. None where all
        engines that are there have the weights; others get them when they are back. Raises RunFailed when
        nothing is sampled or scored for ``timeout_s`` or no engine is left.
        """
        deadline = Deadline(timeout_s, self._measure_idle)
        while behind := [e for e in self.present_engines if self._dispatcher.versions.get(e, -1) < self.version]:
            drained = [engine for engine in behind if self._dispatcher.is_drained(engine)]
            if drained and (len(drained) == len(behind) or not together):
                return drained
            if deadline.is_over():
                raise RunFailed(self._describe_delay("what was requested is not sampled", timeout_s))
            self._work(deadline.end)
        return []

    def _measure_idle(self) -> float:
        """Return seconds since anything was sampled or scored."""
        return time.monotonic() - self._progressed

    def _work(self, deadline: float, calls: Sequence[Any] = ()) -> None:
        """Hand requests out and take in what engines have finished, waiting a second or so for it, or for a call."""
        self._sample_lost_again()
        self.engines.poll()
        self._hand_out()
        self._require()
        came, died = self.engines.collect(deadline, calls)
        for engine, failure in died.items():
            self.lose(engine, failure)
        for engine, samples in came.items():
            self._progressed = time.monotonic() if samples else self._progressed
            for sample in samples:
                if isinstance(sample, GenerationNotice):
                    self._dispatcher.mark_generated(engine, sample.key)
                elif self._dispatcher.finish(engine, sample.key):
                    self._done[sample.key] = sample
        busy = [engine for engine, requests in self._dispatcher.at_work.items() if requests]
        for engine, failure in self.engines.find_hanging(busy).items():
            self.lose(engine, failure)
        if self.queue_file is not None:
            self.queue_file.write_if_due(self._queues)

    def _queues(self) -> Queues:
        loads = {engine: self._dispatcher.load(engine) for engine in self._dispatcher.at_work}
        scoring = {engine: len(held) - loads[engine] for engine, held in self._dispatcher.at_work.items()}
        health = [self.engines.fleet.health(i).name.lower() for i in range(len(self.group))]
        rows = [EngineQueue(i, state, loads.get(i, 0), scoring.get(i, 0)) for i, state in enumerate(health)]
        return Queues(time.time(), self._dispatcher.n_waiting, self._dispatcher.capacity, rows)

    def _hand_out(self) -> None:
        suspect = self.engines.fleet.members(Health.SUSPECT)
        without = suspect if len(suspect) < len(self.working_engines) else ()
        for engine, requests in self._dispatcher.hand_out(without).items():
            self.engines.submit(engine, requests)

    def _describe_delay(self, failure: str, timeout_s: float) -> str:
        """Return the message of a wait that is over: what failed and where the requests are."""
        at_work = self._dispatcher.at_work
        holding = [f"{self.group.reports[i]} with {len(requests)}" for i, requests in at_work.items() if requests]
        holding = holding or ["none"]
        others = f" and {len(holding) - 3} more" if len(holding) > 3 else ""
        return (
            f"{failure}, and none was for {timeout_s:g} s (rollout.timeout_s); engines "
            f"alive: {len(self.working_engines)} of {len(self.group)}; still at work: {', '.join(holding[:3])}{others}"
        )

    def lose(self, engine: int, failure: WorkerDied) -> None:
        """Take an engine out that died, and begin to start it again. Raises ``failure`` when none is left or comes."""
        self.engines.drop(engine)
        self._dispatcher.remove(engine)
        then = self.engines.lose(engine, failure)
        self._sample_lost_again()
        n = len(self.working_engines)
        others = f"are done again by {n} other{'s' * (n > 1)}" if n else "wait for an engine"
        log.warning("%s; its samples %s; %s", failure, others, then, extra={"kind": "death"})

    def _sample_lost_again(self) -> None:
        """Request anew what engines that died had finished and nobody has collected, where their nodes have left too.

        A node may leave any time after its engine, until this is back.
        """
        for engine in self.engines.fleet.absent:
            lost = [key for key, sample in self._done.items() if sample.worker == engine]
            if lost and self.engines.has_lost_node(engine):
                for key in lost:
                    del self._done[key]
                    self._dispatcher.add([self._requests[key]])

    def _refresh(self) -> None:
        """Give engines that have come back the actor's weights, while it does not change them."""
        stale = self.engines.fleet.members(Health.STALE)
        if stale and self.refresh is not None:
            self.refresh(stale)

    def mark_updated(self, versions: Mapping[int, int]) -> None:
        """Note that these engines have weights of these ``versions``, the current ones, whole, and may sample."""
        for engine, version in versions.items():
            self.engines.fleet.change(engine, HealthEvent.READY)
            self._dispatcher.join(engine, version)
        self._hand_out()

    def fetch(self, samples: Sequence[TrainingSample]) -> list[ScoredSample]:
        """Return the arrays of samples. For the few that the driver looks at."""
        return fetch_samples(samples, FETCH_TIMEOUT_S)

    def sleep(self) -> None:
        """Have every engine free its GPU."""
        self.call_engines("sleep", timeout_s=self.config.weights.timeout_s + SLACK_S, activity="going to sleep")

    def wake(self, weights_only: bool = False) -> None:
        """Have every engine be as before; ``weights_only``: as far as new weights need."""
        limit = self.config.weights.timeout_s + SLACK_S
        self.call_engines("wake", weights_only, timeout_s=limit, activity="waking up")

    def call_engines(
        self, method: str, *args: Any, timeout_s: float, activity: str, engines: Sequence[int] | None = None
    ) -> dict[int, Any]:
        """Call ``method`` of every engine's worker that is there, or of those of ``engines``; the results, by engine.

        Those that died of it have none. One that has not answered after ``timeout_s`` hangs, and is ended.
        Raises RunFailed when no engine is left and none comes back.
        """
        called = [engine for engine in self.present_engines if engines is None or engine in engines]
        call = self.group.select(called).submit_control(method, *args, activity=activity)
        (results,) = gather([call], timeout_s, keep_deaths=True, keep_late=True)
        answers = dict(zip(called, results, strict=True))
        for engine, answer in answers.items():
            if isinstance(answer, WorkerDied):
                self.lose(engine, answer)
        return {engine: answer for engine, answer in answers.items() if not isinstance(answer, WorkerDied)}

    @property
    def living_group(self) -> Group:
        """The engines that are there."""
        return self.group.select(self.present_engines)
