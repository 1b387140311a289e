"""The actor of a simulated run, which adds up chunks in the batch's order while it is still being sampled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gkd.planning.simulation.clocks import SimulatedSample, SimulationState


class SimulatedActor:
    """Learns from each step's batch, and calls ``updated`` after the optimizer step.

    ``computing``: whether it works now. The driver takes in no batch while it is recording the step before.
    """

    def __init__(self, state: SimulationState, updated: Callable[[], None]) -> None:
        self._state, self._run, self._updated = state, state.run, updated
        self._clock = state.groups["actor"]
        self.computing = False
        # Of the present step: samples that were fed, the open chunk's tokens, chunks that wait, and its state.
        self._fed, self._chunk = 0, 0.0
        self._chunks: deque[float] = deque()
        self._began = self._preparing = self._prepared = self._recording = False

    def begin_step(self) -> None:
        """Begin the present step, while the driver records the one before."""
        self._fed, self._chunk = 0, 0.0
        self._began = self._preparing = self._prepared = False
        self._recording = True
        if self._run.max_staleness:  # it has what is there before the step is logged
            self._close_chunks()
            self._compute()
        self._state.schedule(self._run.driver.record_s, self._end_recording)

    def _end_recording(self) -> None:
        self._recording = False
        self._feed()

    def deliver(self, sample: SimulatedSample) -> None:
        """Take a sample that is scored."""
        self._state.batches[sample.step].delivered.add(sample.place)
        if sample.step == self._state.step:
            self._feed()

    def _feed(self) -> None:
        """Close chunks as the batch's samples come; begin the update once it is whole."""
        if self._recording or self._preparing or self._state.step not in self._state.batches:
            return
        self._close_chunks()
        if self._fed == len(self._state.batches[self._state.step].samples):
            self._preparing = True
            self._chunks.append(self._chunk)
            self._state.schedule(self._run.driver.prepare_s, self._end_preparing)
        self._compute()

    def _close_chunks(self) -> None:
        """Put what is there of the batch, in its order, into chunks, and close those that are full."""
        if (batch := self._state.batches.get(self._state.step)) is None:
            return
        updating = self._run.updating
        while self._fed in batch.delivered and batch.delivered.issuperset(range(self._fed, self._fed + updating.unit)):
            unit = batch.samples[self._fed : self._fed + updating.unit]
            tokens = sum(self._run.trained_prompt + sample.length for sample in unit)
            if updating.chunk_tokens is not None and self._chunk and self._chunk + tokens > updating.chunk_tokens:
                self._chunks.append(self._chunk)
                self._chunk, self._began = 0.0, True
            self._chunk += tokens
            self._fed += len(unit)

    def _end_preparing(self) -> None:
        self._prepared = True
        self._compute()

    def _compute(self) -> None:
        """Have the actor compute what it has: a batch that was not begun in chunks once it is prepared."""
        if self.computing or not (self._began or self._prepared):
            return
        if self._chunks:
            mean_tokens = self._run.mean_tokens - self._run.prompt + self._run.trained_prompt
            share = self._chunks.popleft() / (mean_tokens * len(self._state.batches[self._state.step].samples))
            self.occupy(self._run.updating.accumulate_s * share * self._state.pace.update, self._compute)
        elif self._prepared:
            self.occupy(self._run.updating.apply_s * self._state.pace.update, self._updated)

    def occupy(self, seconds: float, then: Callable[[], None]) -> None:
        """Have the actor work so long."""
        self.computing, self._clock.busy = True, 1

        def finish() -> None:
            self.computing, self._clock.busy = False, 0
            then()

        self._state.run_after(self._clock, seconds, finish)
