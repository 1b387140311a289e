"""Weights from the actor to the engines, by the way that the placement allows; the driver's part of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from gkd.actor.group import ActorGroup
from gkd.cluster.layout.assignment import Report
from gkd.cluster.workers.colocation import SLACK_S
from gkd.cluster.workers.deadline import Deadline
from gkd.cluster.workers.failure import WorkerDied, WorkerHung
from gkd.cluster.workers.group import DEATH_IS_KNOWN_S, PendingCall, find_first_death, gather, gather_partners
from gkd.config import Config
from gkd.errors import RunFailed
from gkd.rollout.group import RolloutGroup
from gkd.weights.delivery import Destination, Push
from gkd.weights.transfer import Transfer

ANSWERS_S = 5.0
"""Time that an engine which is not hung takes to report how far it is."""


class WeightSync:
    """Has every engine that is there serve the actor's weights, whole, before it samples again.

    They go in buckets, from the actor's ranks to the engines: one call of the driver to each of them starts it, and two
    buckets at most are packed and not loaded everywhere (:mod:`gkd.weights.delivery`). An engine samples until its own
    first bucket comes, whatever the others do; all become idle only where they join a group. An engine that dies is
    left out, as it is while sampling, and gets them when it is back; only in the middle of a collective transfer's
    bucket the others and the actor cannot be had back, and the run ends.

    ``workers`` are the reports of all of the rollout group's workers; ``config.weights.transfer`` is decided.
    """

    def __init__(self, actor: ActorGroup, rollout: RolloutGroup, workers: Sequence[Report], config: Config) -> None:
        self.actor, self.rollout, self.config = actor, rollout, config
        self._transfer: type[Transfer] = config.weights.transfer_class
        self._span = config.rollout.tensor_parallel_size
        self._gpus = [{uuid for r in workers[i : i + self._span] for uuid in r.gpu_uuids}
                      for i in range(0, len(workers), self._span)]  # fmt: skip
        self._group: tuple[int, list[tuple[int, int]]] | None = None
        """Actor rank 0's process, and the engines that are in the group with it, with their processes."""
        self._number = 0  # of the push under way
        self._end = 0.0  # of the push under way (time.monotonic)
        self._receiving: list[int] = []  # engines that the push under way is for

    def push(self, engines: Sequence[int] | None = None) -> None:
        """Send the current weights to all engines that are there, or to these alone, while the others go on.

        Raises RunFailed when that fails, or no bucket is loaded for ``weights.timeout_s``.
        """
        try:
            self._push(engines)
        except RunFailed as failure:
            # What an actor that died was sending is missed elsewhere, maybe before its death is known.
            calls = [self.actor.group.submit_control("state.read_applied")]
            death = None if isinstance(failure, WorkerDied) else find_first_death(calls, DEATH_IS_KNOWN_S)
            if death is None:
                raise
            raise WorkerDied(f"{death}; {failure}") from None

    def push_drained(self, request: Callable[[], None]) -> list[tuple[float, float]]:
        """Send the current weights to every engine as it has sampled what earlier ones were for; returns start and end
        of each time (``time.monotonic``) in which none was there to be sent them.

        Each samples what ``request`` submits as soon as it has them, whatever the others still sample; those of a
        collective transfer, which receive together, once all are drained. Raises as :meth:`push`, and when
        nothing is sampled or scored for ``rollout.timeout_s``.
        """
        self.rollout.version = self.actor.version
        waits, requested = list[tuple[float, float]](), False
        while True:
            began = time.monotonic()
            engines = self.rollout.drain(self.config.rollout.timeout_s, together=self._transfer.collective)
            waits.append((began, time.monotonic()))
            if engines:
                self.push(engines)
            if not requested:
                request()
                requested = True
            if not engines:
                return waits

    def _push(self, engines: Sequence[int] | None) -> None:
        self.rollout.engines.take_in_restarted()
        self._receiving = self.rollout.present_engines if engines is None else list(engines)
        if not self._receiving:  # those that come back get them then
            return
        self.rollout.colocation.prepare_push()
        limit, version = self.config.weights.timeout_s, self.actor.version
        self._end = time.monotonic() + limit
        about = f"weights version {version} (weights.timeout_s={limit:g})"
        if self._transfer.collective:  # which would wait for an engine that is not there any more, or that hangs
            self._call_engines("weights.ping", version, activity=f"doing a step before {about}")
            if not self._transfer.shards and self._group != self._members():
                self._call_engines("weights.pause", version, activity=f"becoming idle for {about}")
                if self._engines:
                    self._form_group(about)
            if not self._engines:  # each was lost just now
                return
        served = self._send(about)
        for engine, served_version in served.items():
            if served_version != version:
                raise RunFailed(
                    f"{self.rollout.group.reports[engine]} serves weights {served_version} instead of {version}"
                )
        self.rollout.mark_updated(served)

    def refresh(self, engines: Sequence[int]) -> None:
        """Send the current weights to engines that have come back, unless that would wait for the actor's chunks."""
        was_busy = self.actor.accumulates  # first: a chunk that fails from here on is for the next time
        self.actor.recover_chunks()
        if not (was_busy or self.actor.accumulates):
            self.push(engines)

    @property
    def _engines(self) -> list[int]:
        """Those of the push under way that are there."""
        return [engine for engine in self.rollout.present_engines if engine in self._receiving]

    def _measure_left(self) -> float:
        """Return seconds that the push under way still has."""
        return max(0.0, self._end - time.monotonic())

    def _send(self, about: str) -> dict[int, Any]:
        """Have the ranks send and the engines load all buckets; returns the versions they serve then, by engine."""
        self._number += 1
        limit = self.config.weights.timeout_s * (1 + len(self._engines)) + SLACK_S  # the driver's own comes before
        push = Push(self._number, self.actor.version, limit)
        arguments = [(push, destinations) for destinations in self._destinations()]
        sending = self.actor.group.submit_each("weights.send", arguments, activity=f"sending {about}")
        if self._transfer.collective:
            receiving = self._submit("weights.receive", push, activity=f"loading {about}")
            calls, deadline = [sending, receiving], self._loading_deadline()
            served = self._wait_together(calls, lambda: f"loading bucket {self._bucket()} of {about}", deadline)[1]
            return dict(zip(self._engines, served, strict=True))
        versions = self._wait_for(sending, about)
        unheard = [engine for engine in self._engines if engine not in versions]
        if unheard:  # they raise why
            versions |= self._call_engines("weights.receive", push, activity=f"loading {about}", engines=unheard)
        return {engine: versions[engine] for engine in self._engines if engine in versions}

    def _destinations(self) -> list[list[Destination]]:
        """Return by rank of the actor which engines that are there receive its buckets."""
        by_rank: list[list[Destination]] = [[] for _ in range(len(self.actor.group))]
        for engine in self._engines:
            packing = self._transfer.packing(self.actor.group.reports, self._gpus[engine])
            for rank in (rank for rank, packs in enumerate(packing) if packs):
                by_rank[rank].append(Destination(engine, self.rollout.group.workers[engine], sum(packing)))
        return by_rank

    def _wait_for(self, sending: PendingCall, about: str) -> dict[int, Any]:
        """Wait until all buckets are loaded, or their engines lost; those that hang at the deadline are.

        Returns the versions that engines serve, by engine, by the ranks' count. Raises RunFailed where no engine hangs,
        but the actor does.
        """
        while True:
            (ranks,) = gather([sending], self._loading_deadline(), keep_late=True)
            self._end = time.monotonic() + self.config.weights.timeout_s
            late = [rank for rank in ranks if isinstance(rank, WorkerHung)]
            if not late:
                return {engine: version for served in ranks for engine, version in served.items()}
            limit, progress = self.config.weights.timeout_s, self._progress()
            if min((idle_s for _, _, idle_s in progress.values()), default=math.inf) < limit:
                continue  # it went on just now
            hanging = {
                engine: loaded + 1
                for engine, (arrived, loaded, _) in progress.items()
                if arrived is None or arrived > loaded
            }
            if not hanging:
                raise RunFailed(str(late[0]))
            for engine, bucket in hanging.items():
                who = self.rollout.group.reports[engine]
                text = f"loading bucket {bucket} of {about}: not done after {limit:g} s, still waiting for {who}"
                self.rollout.lose(engine, WorkerHung(text))

    def _loading_deadline(self) -> Deadline:
        """Return the time that buckets on their way have: it begins again with each that comes or is loaded."""
        return Deadline(self.config.weights.timeout_s, self._measure_idle)

    def _measure_idle(self) -> float:
        """Return seconds since a bucket came to an engine, or was loaded by one; infinite where none answers."""
        return min((idle_s for _, _, idle_s in self._progress().values()), default=math.inf)

    def _progress(self) -> dict[int, tuple[int | None, int, float]]:
        """Return how many buckets have arrived at each engine, how many are loaded, and seconds since either changed.

        They are None, 0 and infinite without an answer.
        """
        engines = self._engines
        call = self._submit("weights.count_arrived", activity="reporting which buckets are loaded")
        (answers,) = gather([call], ANSWERS_S, keep_deaths=True, keep_late=True)
        pairs = zip(engines, answers, strict=True)
        return {engine: (None, 0, math.inf) if isinstance(answer, WorkerDied) else answer for engine, answer in pairs}

    def _bucket(self) -> int:
        """Return the number, from 1, of the bucket that the engines are at."""
        return max((arrived or 0 for arrived, _, _ in self._progress().values()), default=0)

    def _call_engines(
        self, method: str, *args: Any, activity: str, engines: Sequence[int] | None = None
    ) -> dict[int, Any]:
        """Call ``method`` of the workers of ``engines``, None for all; the results by engine, without those that died.

        The push has the time again that was waited for an engine that was lost.
        """
        began, engines = time.monotonic(), self._engines if engines is None else engines
        if not self._measure_left():  # the time is over, and no engine hangs
            raise RunFailed(f"{activity}: no time is left (weights.timeout_s={self.config.weights.timeout_s:g})")
        answers = self.rollout.call_engines(
            method, *args, timeout_s=self._measure_left(), activity=activity, engines=engines
        )
        if len(answers) < len(engines):
            self._end += time.monotonic() - began
        return answers

    def _form_group(self, about: str) -> None:
        """Have actor rank 0 and the engines join a new group."""
        root, engines = self.actor.group.select([0]), self._engines
        self._group = None
        activity = f"joining a group for {about}"
        address = root.call("weights.new_group", timeout_s=self._measure_left(), activity=activity)[0]
        calls = [root.submit("weights.join_group", address, 1 + self._span * len(engines), activity=activity),
                 self._submit("weights.join_group", address, engines, self._span, activity=activity)]  # fmt: skip
        self._wait_together(calls, lambda: activity, self._measure_left())
        self._group = self._members()

    def _members(self) -> tuple[int, list[tuple[int, int]]]:
        engines = [(engine, self.rollout.group.reports[engine].pid) for engine in self._engines]
        return self.actor.group.reports[0].pid, engines

    def _submit(self, method: str, *args: object, activity: str) -> PendingCall:
        return self.rollout.group.select(self._engines).submit_control(method, *args, activity=activity)

    def _wait_together(
        self, calls: list[PendingCall], activity: Callable[[], str], timeout_s: float | Deadline
    ) -> list[list[Any]]:
        """Wait for calls whose workers wait for each other, so that the first death ends the run; their results."""
        try:
            return gather_partners(calls, timeout_s)
        except WorkerDied as death:
            raise WorkerDied(f"{death}; the others were in the middle of {activity()} and wait for it") from None
