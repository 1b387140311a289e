"""The driver's view of the rollout engines: prompts out as engines free up, records in as samples finish."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from gkd.cluster.failure import WorkerDied, WorkerHangs, explain
from gkd.cluster.fetch import fetch_samples, places_of
from gkd.cluster.group import Group, Pending, gather
from gkd.cluster.turns import SLACK_S, Turns
from gkd.config import Config
from gkd.errors import RunFailed
from gkd.rollout.heartbeat import Heartbeat
from gkd.rollout.stream import RecordStream
from gkd.types import Job, Judging, Record, Request, Scored

log = logging.getLogger("gkd")
FETCH_TIMEOUT_S = 300.0
LOOK_EVERY_S = 1.0


class RolloutGroup:
    """Hands each request to the engine with most free places.

    When an engine dies while others live, what it was doing is done again by these; when none is left the run fails.
    One that hangs for ``rollout.engine_timeout_s`` is ended and counts as one that died. What an engine had finished is
    not lost: samples belong to this process and stay in the object store of their node.
    So it is with teachers and references, ``serving`` by group: their clients ask another replica, and without any the
    run fails at once instead of after a deadline. ``require`` raises what else ends the run while it waits here.
    """

    def __init__(
        self,
        group: Group,
        config: Config,
        serving: Mapping[str, Pending],
        turns: Turns | None = None,
        followers: Sequence[Pending] = (),
        require: Callable[[], None] = lambda: None,
    ) -> None:
        self.group, self.config, self.turns = group, config, turns or Turns()
        self._require = require
        # What serves until it fails, by reference: the group it belongs to, and its name for messages.
        self._judges = {
            ref: (name, who)
            for name, calls in serving.items()
            for ref, who in zip(calls.refs, calls.workers, strict=True)
        }
        # Parts of engines on further nodes. When one fails, its leader ends, and this is told as the reason.
        self._followers = {ref: who for call in followers for ref, who in zip(call.refs, call.workers, strict=True)}
        self.alive = list(range(len(group)))
        self._next_key = 0
        self._serving = group.submit("serve")  # what it raises comes out of the streams
        self._streams = {i: RecordStream(group.stream(i, "records")) for i in self.alive}
        self._heartbeat = Heartbeat(group, config.rollout.engine_timeout_s)

    def sample(self, requests: Sequence[Request], judging: Judging, timeout_s: float) -> list[Record]:
        """Have every request sampled and judged.

        Returns one record a request, in the order of ``requests``. Raises RunFailed when ``timeout_s`` is over or no
        engine is left.
        """
        self.turns.for_engines()
        first = self._next_key
        self._next_key += len(requests)
        jobs = {first + i: Job(first + i, r, judging) for i, r in enumerate(requests)}
        waiting = list(reversed(jobs.values()))  # taken from the end
        at_work: dict[int, dict[int, Job]] = {i: {} for i in self.alive}
        found: dict[int, Record] = {}
        deadline = time.monotonic() + timeout_s
        self._heartbeat.begin()
        while len(found) < len(requests):
            self._hand_out(waiting, at_work)
            if time.monotonic() > deadline:
                raise RunFailed(self._late(len(requests) - len(found), timeout_s, at_work))
            for engine, records in [*self._collect(deadline), *self._end_hanging(at_work)]:
                if engine not in at_work:  # it has ended since
                    continue
                if records is None:
                    waiting += at_work.pop(engine).values()
                    continue
                for record in records:
                    if at_work[engine].pop(record.key, None) is not None:
                        found[record.key] = record
        return [found[key] for key in sorted(found)]

    def _hand_out(self, waiting: list[Job], at_work: dict[int, dict[int, Job]]) -> None:
        """Fill the engines' free places, the emptiest engine first."""
        chosen: dict[int, list[Job]] = {}
        capacity = self.config.rollout.max_num_seqs
        while waiting:
            engine = min(at_work, key=lambda i: len(at_work[i]))
            if len(at_work[engine]) >= capacity:
                break
            job = waiting.pop()
            at_work[engine][job.key] = job
            chosen.setdefault(engine, []).append(job)
        for engine, jobs in chosen.items():
            self.group.workers[engine].control.remote("submit", jobs)

    def _collect(self, deadline: float) -> list[tuple[int, list[Record] | None]]:
        """Records that have come within a second or so, by engine; None for an engine that died."""
        self._require()
        engines = {stream.awaited: engine for engine, stream in self._streams.items()}
        watched = [*engines, *self._judges, *self._followers]
        # Samples stay on their node until the actor wants them.
        left = min(LOOK_EVERY_S, max(0.0, deadline - time.monotonic()))
        ready, _ = ray.wait(watched, num_returns=1, timeout=left, fetch_local=False)
        found: list[tuple[int, list[Record] | None]] = []
        for ref in ready:
            if ref in self._judges:
                self._lose_judge(ref)
                continue
            if ref in self._followers:
                self._tell_of_followers()
                continue
            engine = engines[ref]
            try:
                found.append((engine, self._next(engine)))
            except WorkerDied as failure:
                self._lose(engine, failure)
                found.append((engine, None))
        return found

    def _next(self, engine: int) -> list[Record]:
        """Records of what an engine has finished."""
        try:
            return self._streams[engine].take()
        except StopIteration:
            raise RunFailed(f"{self.group.reports[engine]} stopped sampling by itself") from None
        except RayError as error:
            raise self.group.explain(engine, error) from error

    def _end_hanging(self, at_work: Mapping[int, Mapping[int, Job]]) -> list[tuple[int, None]]:
        """End engines that have work and do not do it; returns them, as :meth:`_collect` does those that died."""
        ended: list[tuple[int, None]] = []
        limit = self.config.rollout.engine_timeout_s
        for engine in self._heartbeat.hanging([i for i in self.alive if at_work.get(i)]):
            who = self.group.reports[engine]
            self._lose(engine, WorkerHangs(f"{who} has done nothing for {limit:g} s (rollout.engine_timeout_s)"))
            ended.append((engine, None))
        return ended

    def _late(self, missing: int, timeout_s: float, at_work: Mapping[int, Mapping[int, Job]]) -> str:
        """What is said when a batch takes too long."""
        holding = [f"{self.group.reports[i]} with {len(jobs)}" for i, jobs in at_work.items() if jobs]
        others = f" and {len(holding) - 3} more" if len(holding) > 3 else ""
        return (
            f"{missing} samples were not finished and scored within {timeout_s:g} s (rollout.timeout_s); engines "
            f"alive: {len(self.alive)} of {len(self.group)}; still at work: {', '.join(holding[:3])}{others}"
        )

    def _lose(self, engine: int, failure: WorkerDied) -> None:
        self._tell_of_followers()
        self.alive.remove(engine)
        del self._streams[engine]
        if isinstance(failure, WorkerHangs):
            self.group.end(engine)
        if not self.alive:
            raise failure
        log.warning("%s; its samples are done again by the other %d engines", failure, len(self.alive))

    def _tell_of_followers(self) -> None:
        """Name the parts of engines that have failed, which is why their leaders end."""
        if not self._followers:
            return
        failed, _ = ray.wait(list(self._followers), num_returns=len(self._followers), timeout=0)
        for serving in failed:
            who = self._followers.pop(serving)
            try:
                ray.get(serving, timeout=FETCH_TIMEOUT_S)
            except Exception as error:
                log.warning("%s is lost, and the engine that it is a part of with it: %s", who, explain(error, who))

    def _lose_judge(self, serving: Any) -> None:
        self._tell_of_followers()
        group, who = self._judges.pop(serving)
        try:
            ray.get(serving)
            failure: Exception = RunFailed(f"{who} stopped serving by itself")
        except Exception as error:
            failure = explain(error, who)
        others = sum(name == group for name, _ in self._judges.values())
        if not others:
            raise failure
        log.warning("%s; %d others of the %s group go on", failure, others, group)

    def fetch(self, records: Sequence[Record]) -> list[Scored]:
        """The samples behind records, with the arrays. For the few that the driver looks at."""
        return fetch_samples(places_of(records), FETCH_TIMEOUT_S)

    def give_back(self) -> None:
        """Have every living engine leave its GPU to others."""
        self.tell("give_back", timeout_s=self.config.weights.timeout_s + SLACK_S, what="giving memory back")

    def take_back(self, weights_only: bool = False) -> None:
        """Have every living engine be as before; ``weights_only``: as far as new weights need."""
        limit = self.config.weights.timeout_s + SLACK_S
        self.tell("take_back", weights_only, timeout_s=limit, what="taking memory again")

    def tell(self, method: str, *args: Any, timeout_s: float, what: str) -> dict[int, Any]:
        """Call ``method`` of every living engine's worker; what it gave, by engine, without those that died of it.

        One that has not answered after ``timeout_s`` hangs, and is ended.

        Raises RunFailed when no engine is left.
        """
        asked = list(self.alive)
        call = self.group.only(asked).submit_control(method, *args, what=what)
        (told,) = gather([call], timeout_s, keep_deaths=True, keep_late=True)
        answers = dict(zip(asked, told, strict=True))
        for engine, answer in answers.items():
            if isinstance(answer, WorkerDied):
                self._lose(engine, answer)
        return {engine: answers[engine] for engine in self.alive}

    @property
    def living(self) -> Group:
        """The engines that are there."""
        return self.group.only(self.alive)
