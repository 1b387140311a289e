"""Scorers of a simulated run, which take samples as they finish, those first that are trained first."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from gkd.planning.simulation.clocks import SimulatedSample, SimulationState


class SimulatedScorers:
    """Scores samples by every group that scores; ``deliver`` takes each that all have scored."""

    def __init__(self, state: SimulationState, deliver: Callable[[SimulatedSample], None]) -> None:
        self._state, self._run, self._deliver = state, state.run, deliver
        # What is to be sent to scorers, by step and place; what they were sent and have not begun; with what they have.
        scoring = self._run.scoring
        self._unsent: dict[str, list[tuple[int, int, SimulatedSample]]] = {name: [] for name in scoring}
        self._queues: dict[str, deque[SimulatedSample]] = {name: deque() for name in scoring}
        self._held = dict.fromkeys(scoring, 0)

    def begin(self, sample: SimulatedSample) -> None:
        """Have all scorers score a sample, and deliver it then."""
        for name in self._run.scoring:
            heapq.heappush(self._unsent[name], (sample.step, sample.place, sample))
            self._score(name)
        if not self._run.scoring:
            self._finish(sample)

    def _score(self, name: str) -> None:
        group, scoring, queue = self._state.groups[name], self._run.scoring[name], self._queues[name]
        while self._unsent[name] and self._held[name] < scoring.n_servers * max(scoring.held, scoring.a_pass):
            queue.append(heapq.heappop(self._unsent[name])[-1])
            self._held[name] += 1
        while queue and group.busy < scoring.n_servers:
            samples = [queue.popleft() for _ in range(min(scoring.a_pass, len(queue)))]
            group.busy += 1
            tokens = sum(self._run.prompt + sample.length for sample in samples) / self._run.mean_tokens
            self._state.run_after(
                group, scoring.seconds * tokens * self._state.pace.score, partial(self._end_scoring, name, samples)
            )

    def _end_scoring(self, name: str, samples: Sequence[SimulatedSample]) -> None:
        self._state.groups[name].busy -= 1
        self._held[name] -= len(samples)
        self._score(name)
        for sample in samples:
            sample.unscored -= 1
            if not sample.unscored:
                self._finish(sample)

    def _finish(self, sample: SimulatedSample) -> None:
        """Give the sample to the actor once it is its turn."""
        batch = self._state.batches[sample.step]
        batch.unscored -= 1
        if not batch.unscored:
            batch.scored = self._state.time
        self._state.schedule(self._run.driver.deliver_s, partial(self._deliver, sample))
