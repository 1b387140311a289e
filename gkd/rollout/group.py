"""The driver's view of the rollout engines: requests out as engines free up, samples in as they are scored."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from gkd.cluster.health.fleet import PRESENT, WORKING, Fleet, Health, HealthEvent
from gkd.cluster.health.heartbeat import Heartbeat
from gkd.cluster.health.queues import EngineQueue, QueueFile, Queues
from gkd.cluster.health.restarts import Restarts, StartAgain, return_text
from gkd.cluster.session.port import listens
from gkd.cluster.workers.colocation import SLACK_S, Colocation
from gkd.cluster.workers.failure import WorkerDied, WorkerHangs, explain
from gkd.cluster.workers.group import Group, Pending, fetch_samples, gather
from gkd.config import Config
from gkd.errors import RunFailed
from gkd.rollout.dispatch import RequestDispatcher
from gkd.rollout.stream import SampleStream
from gkd.scoring.client import ScoringClient
from gkd.scoring.watch import Expected, ScorerWatch
from gkd.types import SampleRequest, ScoredSample, TrainingSample, Unscored

log = logging.getLogger("gkd")
FETCH_TIMEOUT_S = 300.0
ENGINES = "rollout"
"""The engines' group."""
LOOK_EVERY_S = 1.0
NODE_ANSWERS_S = 2.0
LATE_EVERY_S = 0.05  # where samples are on their way between nodes


class RolloutGroup:
    """Hands requests to the engines as these have places free, and keeps what they finish until it is collected.

    When an engine dies, what it was doing is done again by the others, or waits. It is started again as ``again`` says,
    gets the current weights from ``refresh``, and takes part once it has them; when none is left or comes back the run
    fails. One that hangs for ``rollout.engine_timeout_s`` is ended and counts as one that died. What an engine had
    finished is not lost: samples belong to this process and stay in the object store of their node, and where that
    has left, those that are not collected are sampled again.
    ``scorers`` are watched meanwhile, for the engines and for ``clients`` of this process, by model. ``require`` raises
    what else ends the run while it waits here.
    """

    def __init__(
        self,
        group: Group,
        config: Config,
        scorers: ScorerWatch | None = None,
        colocation: Colocation | None = None,
        followers: Sequence[Pending] = (),
        require: Callable[[], None] = lambda: None,
        again: StartAgain | None = None,
        clients: Mapping[str, ScoringClient] | None = None,
    ) -> None:
        self.group, self.config, self.colocation = group, config, colocation or Colocation()
        self._require, self._clients = require, clients or {}
        self.scorers = scorers or ScorerWatch({}, Fleet())
        self._fleet = self.scorers.fleet
        self._fleet.add(ENGINES, len(group))
        self._restarts = Restarts(self._fleet, ENGINES, again)
        self.queue_file: QueueFile | None = None
        """Where the engines' queues are shown; None: nowhere."""
        self.refresh: Callable[[Sequence[int]], None] | None = None
        """What sends the actor's weights to these engines, by :meth:`updated` the end of it; None: nothing does."""
        # Parts of engines on further nodes. When one fails, its leader ends, and this is the reason.
        self._followers = {
            ref: worker for call in followers for ref, worker in zip(call.refs, call.workers, strict=True)
        }
        self._next_key = 0
        spill = None if config.has_group_rewards else config.rollout.n
        self._dispatcher = RequestDispatcher(
            self.working, config.rollout.slots, spill, apart=config.schedule.max_staleness == 0
        )
        self._done: dict[int, TrainingSample] = {}  # finished and not collected yet, by key
        self._requests: dict[int, tuple[float, SampleRequest]] = {}  # all that is not collected, with its order, by key
        self._streams: dict[int, SampleStream] = {}
        for engine in self.working:
            self._serve(engine)
        self._heartbeat = Heartbeat(group, config.rollout.engine_timeout_s)

    def _serve(self, engine: int) -> None:
        """Have an engine's worker run it; what that raises comes out of the stream."""
        self.group.select([engine]).submit("serve")
        self._streams[engine] = SampleStream(self.group.stream(engine, "stream_samples"))

    @property
    def working(self) -> list[int]:
        """The engines that sample."""
        return self._fleet.members(ENGINES, *WORKING)

    @property
    def present(self) -> list[int]:
        """The engines whose process is there, those included that have yet to get weights."""
        return self._fleet.members(ENGINES, *PRESENT)

    def sample(self, requests: Sequence[SampleRequest], timeout_s: float) -> list[TrainingSample]:
        """Have every request sampled and scored, before what was submitted earlier and waits.

        Returns one sample a request, in the order of ``requests``. Raises as :meth:`collect`.
        """
        return self.collect(self.submit(requests), timeout_s)

    def submit(self, requests: Sequence[SampleRequest], order: float = 0) -> list[int]:
        """Queue requests for :meth:`collect`; returns their keys. Those of a lower ``order`` go to engines first.

        Where all samples of a step are of the same weights (staleness 0) those of a higher one are not sampled beside
        them: equal seeds then give equal runs, validated or not.
        """
        self.colocation.wake_engines()
        if not len(self._dispatcher):
            self._heartbeat.begin()
        keys = list(range(self._next_key, self._next_key + len(requests)))
        self._next_key += len(requests)
        keyed = [replace(request, key=key, order=order) for key, request in zip(keys, requests, strict=True)]
        self._requests |= {request.key: (order, request) for request in keyed}
        self._dispatcher.add(keyed, order)
        self._hand_out()
        return keys

    def collect(self, keys: Sequence[int], timeout_s: float) -> list[TrainingSample]:
        """Wait until the requests of ``keys`` are sampled and scored; returns their samples in this order.

        Raises RunFailed when ``timeout_s`` is over, or no engine is left and none comes back.
        """
        return [sample for samples in self.in_order(keys, timeout_s) for sample in samples]

    def in_order(self, keys: Sequence[int], timeout_s: float) -> Iterator[list[TrainingSample]]:
        """Yield the samples of ``keys`` in this order, as many as are there at a time. Raises as :meth:`collect`."""
        deadline, left = time.monotonic() + timeout_s, deque(keys)
        while left:
            there: list[TrainingSample] = []
            while left and left[0] in self._done:
                there.append(self._hand_over(left.popleft()))
            if there:
                yield there
                continue
            self._refresh()
            if time.monotonic() > deadline:
                missing = sum(key not in self._done for key in left)
                raise RunFailed(self._late(f"{missing} samples were not finished and scored", timeout_s))
            self._work(deadline)

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

    def drain(self, timeout_s: float) -> None:
        """Return once everything requested is sampled, so that new weights change none of it; scoring goes on.

        What waits where no engine works gets the weights that engines have when they are back. Raises RunFailed when
        ``timeout_s`` is over or no engine is left.
        """
        deadline = time.monotonic() + timeout_s
        while self.working and self._dispatcher.n_unsampled:
            if time.monotonic() > deadline:
                raise RunFailed(self._late("what was requested was not sampled", timeout_s))
            self._work(deadline)

    def _work(self, deadline: float, calls: Sequence[Any] = ()) -> None:
        """Hand requests out and take in what engines have finished, waiting a second or so for it, or for a call."""
        self.take_in_restarted()
        self._expect_scorers(self.scorers.look(), self.present)
        self._hand_out()
        for engine, samples in self._collect(deadline, calls):
            for sample in samples:
                if isinstance(sample, Unscored):
                    self._dispatcher.mark_generated(engine, sample.key)
                elif self._dispatcher.finish(engine, sample.key):
                    self._done[sample.key] = sample
        self._end_hanging()
        if self.queue_file is not None:
            self.queue_file.look(self._queues)

    def _queues(self) -> Queues:
        engines = range(len(self.group))
        loads = {engine: self._dispatcher.load(engine) for engine in self._dispatcher.at_work}
        scoring = {engine: len(held) - loads[engine] for engine, held in self._dispatcher.at_work.items()}
        rows = [
            EngineQueue(i, self._fleet.health(ENGINES, i).name.lower(), loads.get(i, 0), scoring.get(i, 0))
            for i in engines
        ]
        return Queues(time.time(), self._dispatcher.n_waiting, self._dispatcher.capacity, rows)

    def _hand_out(self) -> None:
        suspect = self._fleet.members(ENGINES, Health.SUSPECT)
        without = suspect if len(suspect) < len(self.working) else ()
        for engine, requests in self._dispatcher.hand_out(without).items():
            self.group.workers[engine].control.remote("submit", requests)

    def _collect(self, deadline: float, calls: Sequence[Any]) -> list[tuple[int, list[TrainingSample | Unscored]]]:
        """Return samples that come within a second or so, by engine; none when one of ``calls`` is done before."""
        self._require()
        late = [engine for engine, stream in self._streams.items() if stream.is_late]
        engines = {stream.items: engine for engine, stream in self._streams.items() if not stream.is_late}
        scoring = self.scorers.calls
        watched = [*engines, *scoring, *self._followers, *calls]
        left = min(LATE_EVERY_S if late else LOOK_EVERY_S, max(0.0, deadline - time.monotonic()))
        # Arrays stay on their node until the actor wants them.
        ready: list[Any] = []
        if watched:
            ready, _ = ray.wait(watched, num_returns=1, timeout=left, fetch_local=False)
        else:
            time.sleep(left)
        for ref in ready:
            if ref in scoring:
                self._warn_of_followers()
                self.scorers.lose(ref)
            elif ref in self._followers:
                self._warn_of_followers()
        collected: list[tuple[int, list[TrainingSample | Unscored]]] = []
        for engine in [*late, *(engines[ref] for ref in ready if ref in engines)]:
            try:
                collected.append((engine, self._next(engine)))
            except WorkerDied as failure:
                self.lose(engine, failure)
            else:
                self._streams[engine] = self._streams.pop(engine)  # the others come before it the next time
        return collected

    def _next(self, engine: int) -> list[TrainingSample | Unscored]:
        """Return samples that an engine has finished."""
        try:
            return self._streams[engine].take()
        except StopIteration:
            raise RunFailed(f"{self.group.reports[engine]} stopped sampling by itself") from None
        except RayError as error:
            raise self.group.explain(engine, error) from error

    def _end_hanging(self) -> None:
        """End engines that have work and do not do it; those that have not for half of that time are suspect."""
        limit = self.config.rollout.engine_timeout_s
        busy = [engine for engine in self.working if self._dispatcher.at_work[engine]]
        hanging = self._heartbeat.find_hanging(busy)
        for engine in self.working:
            silent = engine in busy and self._heartbeat.silent_s(engine) > limit / 2
            self._fleet.change(ENGINES, engine, HealthEvent.SILENT if silent else HealthEvent.ANSWERED)
        for engine in hanging:
            who = self.group.reports[engine]
            self.lose(engine, WorkerHangs(f"{who} has done nothing for {limit:g} s (rollout.engine_timeout_s)"))

    def _late(self, failure: str, timeout_s: float) -> str:
        """Return the message of a wait that is over: what failed and where the requests are."""
        at_work = self._dispatcher.at_work
        holding = [f"{self.group.reports[i]} with {len(requests)}" for i, requests in at_work.items() if requests]
        others = f" and {len(holding) - 3} more" if len(holding) > 3 else ""
        return (
            f"{failure} within {timeout_s:g} s (rollout.timeout_s); engines "
            f"alive: {len(self.working)} of {len(self.group)}; still at work: {', '.join(holding[:3])}{others}"
        )

    def lose(self, engine: int, failure: WorkerDied) -> None:
        """Take an engine out that died, and begin to start it again. Raises ``failure`` when none is left or comes."""
        self._warn_of_followers()
        self._dispatcher.remove(engine)
        del self._streams[engine]
        self._sample_again(engine)
        if isinstance(failure, WorkerHangs):
            self.group.end(engine)
        then = self._restarts.lose(engine)
        if self._restarts.is_lost:
            raise failure
        n = len(self.working)
        others = f"its samples are done again by the other {n} engines" if n else "its samples wait for an engine"
        log.warning("%s; %s; %s", failure, others, then, extra={"kind": "death"})

    def _sample_again(self, engine: int) -> None:
        """Request anew what an engine had finished and nobody has collected, where its node has left with it."""
        service, node_id = self.group.service, self.group.reports[engine].node_id
        if service is not None and not service.answers():  # who would say which nodes are there
            return
        # Ray takes seconds to note that a node went down.
        node = next((node for node in ray.nodes() if node["NodeID"] == node_id and node["Alive"]), None)
        if node is not None and listens(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}", NODE_ANSWERS_S):
            return
        for key in [key for key, sample in self._done.items() if sample.worker == engine]:
            del self._done[key]
            order, request = self._requests[key]
            self._dispatcher.add([request], order)

    def take_in_restarted(self) -> None:
        """Take in the new workers of engines that died; they sample once they have the weights."""
        for engine, worker in self._restarts.take().items():
            old = self.group.reports[engine]
            self.group = self.group.replace_worker(engine, worker)
            self._heartbeat.replace(engine, self.group)
            self._serve(engine)
            text = f"{return_text(worker.reports[0], old)}; it gets the weights"
            log.info(text, extra={"kind": "restart"})
            self._expect_scorers(self.scorers.absent(), [engine])

    def _expect_scorers(self, expected: Iterable[Expected], engines: Sequence[int]) -> None:
        """Have clients wait for scorers that are being started, where there is no other."""
        for its in expected:
            for engine in engines:
                self.group.workers[engine].control.remote("pipeline.expect_scorer", *its)
            if its.model in self._clients:
                self._clients[its.model].expect(its.name, its.within_s, its.address)

    def _refresh(self) -> None:
        """Give engines that have come back the actor's weights, while it does not change them."""
        stale = self._fleet.members(ENGINES, Health.STALE)
        if stale and self.refresh is not None:
            self.refresh(stale)

    def mark_updated(self, engines: Iterable[int]) -> None:
        """Note that these engines have the current weights, whole, and may sample."""
        for engine in engines:
            self._fleet.change(ENGINES, engine, HealthEvent.READY)
            self._dispatcher.join(engine)
        self._hand_out()

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
        called = [engine for engine in self.present if engines is None or engine in engines]
        call = self.group.select(called).submit_control(method, *args, activity=activity)
        (results,) = gather([call], timeout_s, keep_deaths=True, keep_late=True)
        answers = dict(zip(called, results, strict=True))
        for engine, answer in answers.items():
            if isinstance(answer, WorkerDied):
                self.lose(engine, answer)
        return {engine: answer for engine, answer in answers.items() if not isinstance(answer, WorkerDied)}

    @property
    def living(self) -> Group:
        """The engines that are there."""
        return self.group.select(self.present)
