"""The end of a step: its validation, beside the step after it; then its row in metrics.jsonl and its checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gkd.cluster.workers.activity import record_activity
from gkd.config import Config
from gkd.driver.checkpoints.checkpoint import RunState
from gkd.driver.loop.collect import Batches
from gkd.driver.loop.parts import Parts, RunLog
from gkd.driver.validation.held_out import RequestedValidation
from gkd.driver.validation.val_sets import RequestedSets
from gkd.observability import metrics as measured
from gkd.observability.watch import Watcher


@dataclass(frozen=True, slots=True)
class RunningValidation:
    """A validation under way, of the weights after ``step``, since ``began`` (``time.time``). None: not due."""

    step: int
    began: float
    usual: RequestedValidation | None
    sets: RequestedSets


class StepEnds:
    """Validates the student where that is due after a step that is trained and pushed, logs the step and saves it.

    What a validation needs of the engines is requested with the samples of the step after it, and sampled behind them,
    at staleness 0 once the last of them is generated. It ends before that step's optimizer step: until then actor and
    engines hold the weights that it measures, and a checkpoint, the best student and a run that stops early are of them
    as well. ``first`` is the step that the run goes on after.
    """

    def __init__(self, config: Config, parts: Parts, log: RunLog, batches: Batches, first: int) -> None:
        self.config, self.parts, self.log, self.batches, self.first = config, parts, log, batches, first
        self._watcher = Watcher(config, parts.device, parts.model.n_unsampled)
        self._validating: RunningValidation | None = None
        self._epoch = 0.0

    @property
    def validates(self) -> bool:
        """Whether a validation is under way."""
        return self._validating is not None

    def validate(self, step: int) -> None:
        """Request what is to be measured after ``step``, if anything, which the engines then have the weights of.

        It goes behind what is requested for the next step already, and ahead of steps after that.
        """
        self._validating = self._request(step)

    def _request(self, step: int, rest: bool = False) -> RunningValidation | None:
        """Request what is due after ``step``, or what is not, for the ``rest``."""
        parts, due, sets = self.parts, self._is_due(step) != rest, self.parts.val_sets.select_due_sets(step, rest)
        if not due and not sets:
            return None
        if parts.answers is not None:  # engines that are given weights for validations alone
            parts.actor.wait_for_chunks()  # which a push would wait for
            parts.sync.push()
        began, order = time.time(), step + 1.5  # after what is requested for the next step
        usual = parts.validation.request(order) if due else None
        return RunningValidation(step, began, usual, parts.val_sets.request(sets, order))

    def _is_due(self, step: int) -> bool:
        """Return whether the student is validated after ``step``, besides on sets with intervals of their own."""
        trainer = self.config.trainer
        return step % trainer.val_every == 0 or step == trainer.total_steps

    def end(self, state: RunState) -> RunState:
        """Log and save a step, unless its validation is under way: then :meth:`finish` does. Returns its state."""
        self._epoch = self.batches.epoch(state.step)
        return state if self._validating is not None else self._log(state, {})

    def finish(self, state: RunState) -> RunState:
        """Wait for the validation of the step of ``state``, if one is under way, then log and save the step."""
        if self._validating is None:
            return state
        figures, self._validating = self._measure(self._validating), None
        return self._log(state, figures)

    @record_activity("validate")
    def _measure(self, validating: RunningValidation | None) -> dict[str, float]:
        if validating is None:
            return {}
        set_scores = self.parts.val_sets.measure(validating.sets)
        usual = {} if validating.usual is None else self.parts.validation.measure(validating.usual)
        self.log.timeline.add_validation(validating.step, validating.began, time.time())
        return measured.keep_finite(usual | set_scores)

    def _log(self, state: RunState, figures: dict[str, float]) -> RunState:
        """Write the metrics of a step with the ``figures`` of its validation, and begin a checkpoint if it is time."""
        log, step = self.log, state.step
        log.stop.update(step, figures)
        if log.stops_early:  # a run ends with every figure
            figures = figures | self._measure(self._request(step, rest=True))
        validated = {**(self._set_figures(state.validated) if self._is_due(step) else state.validated), **figures}
        row = {**(state.row or {}), **figures}
        is_last = step == self.config.trainer.total_steps or log.stops_early
        attend = None if is_last else self.parts.rollout.attend  # the next step is under way
        log.metrics.write({"step": step, "epoch": self._epoch, **row})
        if log.best is not None:
            log.best.update(step, row, self.parts.actor, attend)
        log.progress.step(step, row)
        self._watcher.check(step, row)
        state = replace(state, validated=validated, row=None)
        if step > self.first:
            log.checkpoints.save_if_due(self.parts.actor, state, log.stops_early, attend)
        return state

    def _set_figures(self, validated: Mapping[str, float]) -> dict[str, float]:
        """Return the last figures of validation sets, which have intervals of their own."""
        begins = tuple(f"val/{questions.name}/" for questions in self.parts.val_sets.sets)
        return {name: value for name, value in validated.items() if begins and name.startswith(begins)}
