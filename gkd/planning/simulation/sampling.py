"""Engines of a simulated run: requests go to the emptiest one and hold a place there until they are sampled."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial

from gkd.planning.simulation.clocks import EngineClock, SimulatedBatch, SimulatedSample, SimulationState
from gkd.schedule import TicketSchedule

ENDLESS = 1 << 40
LEAST_PACE = 1e-3  # of a step in which the run's engines had nothing to do


class SimulatedEngines:
    """Samples what the run's schedule admits. ``score`` takes each sample, and ``sampled`` is called after some ended.

    ``waiting``: requests that no engine has a place for.
    """

    def __init__(
        self, state: SimulationState, score: Callable[[SimulatedSample], None], sampled: Callable[[], None]
    ) -> None:
        self._state, self._run, self._score, self._sampled = state, state.run, score, sampled
        self.engines = [EngineClock() for _ in range(self._run.sampling.n_engines)]
        self.waiting: deque[SimulatedSample] = deque()
        self._tickets = TicketSchedule(self._run.n_prompts, self._run.max_staleness, ENDLESS, lambda n: [0] * n)
        self._homes: dict[tuple[int, int], int] = {}

    def dispatch(self, version: int) -> None:
        """Request what may be sampled from weights of ``version`` on."""
        for tickets in self._tickets.admit(version):
            step, lengths = tickets[0].step, self._run.lengths(tickets[0].step)
            samples = [
                SimulatedSample(step, i, (step, i // self._run.n), length, version, unscored=len(self._run.scoring))
                for i, length in enumerate(lengths)
            ]
            self._state.batches[step] = SimulatedBatch(samples, self._state.time, len(samples), len(samples))
            self.waiting += samples
        self._state.schedule(self._run.driver.start_s, self._hand_out)

    def _hand_out(self, *changed_engines: int) -> None:
        """Fill the engines' free places, as :class:`gkd.rollout.dispatch.RequestDispatcher` does.

        Those that have changed otherwise go on as well.
        """
        engines, capacity = self.engines, self._run.sampling.capacity
        changed = set(changed_engines)
        while self.waiting:
            emptiest, least = -1, capacity
            for number, engine in enumerate(engines):
                if engine.held < least and engine.version >= self.waiting[0].version:
                    emptiest, least = number, engine.held
            if emptiest < 0:
                break
            sample = self.waiting.popleft()
            home = self._homes.get(sample.prompt, emptiest)
            if engines[home].held == capacity:
                home = emptiest
            self._homes[sample.prompt], sample.engine = home, home
            engines[home].held += 1
            engines[home].waiting.append(sample)
            changed.add(home)
        for number in changed:
            self.go_on(number)

    def go_on(self, number: int) -> None:
        """Account for what an engine has sampled so far, begin what waits there, and plan its next end of a sample."""
        engine, group, sampling = self.engines[number], self._state.groups["rollout"], self._run.sampling
        self.account(engine)
        was_busy = bool(engine.running)
        for sample, length in self._begin(engine):
            heapq.heappush(engine.running, (engine.tokens + length, self._state.take_number(), sample))
            engine.at += sampling.prefill_s
        group.busy += bool(engine.running) - was_busy
        engine.planned += 1
        if engine.running:
            left = (engine.running[0][0] - engine.tokens) * self._token_s(engine)
            self._state.run_after(
                group, engine.at - group.now + left, partial(self._end_sampling, number, engine.planned)
            )

    def _begin(self, engine: EngineClock) -> list[tuple[SimulatedSample, float]]:
        """Return the waiting samples that an engine begins now, and the tokens after which each comes out of it."""
        sampling = self._run.sampling
        if engine.running and not sampling.continuous:
            return []
        n = min(len(engine.waiting), sampling.running - len(engine.running))
        begun = [engine.waiting.popleft() for _ in range(n)]
        longest = max((sample.length for sample in begun), default=0.0)
        return [(sample, sample.length if sampling.continuous else longest) for sample in begun]

    def account(self, engine: EngineClock) -> None:
        """Count what an engine has sampled so far."""
        now = self._state.groups["rollout"].now
        if engine.running and now > engine.at:
            engine.tokens += (now - engine.at) / self._token_s(engine)
        engine.at = max(engine.at, now)

    def _token_s(self, engine: EngineClock) -> float:
        return self._run.sampling.token_s(len(engine.running)) * max(self._state.pace.sample, LEAST_PACE)

    def recompute(self, number: int) -> None:
        """Have an engine compute what its sequences have cached under the new weights."""
        engine = self.engines[number]
        self.account(engine)
        so_far = (self._run.prompt + sample.length - (end - engine.tokens) for end, _, sample in engine.running)
        engine.at += self._run.sampling.recompute_s * sum(so_far)
        self.go_on(number)

    def _end_sampling(self, number: int, planned: int) -> None:
        """Take the samples that an engine has finished, unless its next end was planned anew meanwhile."""
        engine = self.engines[number]
        if engine.planned != planned:
            return
        group = self._state.groups["rollout"]
        engine.tokens, engine.at = engine.running[0][0], group.now
        finished = []
        while engine.running and engine.running[0][0] <= engine.tokens + 1e-6:
            finished.append(heapq.heappop(engine.running)[2])
        group.busy -= not engine.running
        for sample in finished:
            self.engines[number].held -= 1
            batch = self._state.batches[sample.step]
            batch.unsampled -= 1
            if not batch.unsampled:
                batch.generated = self._state.time
            self._state.schedule(self._run.driver.score_s, partial(self._score, sample))
        self._hand_out(number)
        self._sampled()
