"""The training loop: sample, score, update, send the weights back, over and over."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from gkd.actor.group import ActorGroup
from gkd.algorithms.training_samples import require_rewards, with_advantages
from gkd.cluster.group import WorkerReport, WorkerReports
from gkd.config import Config
from gkd.data.stream import PromptStream
from gkd.driver.best import BestModel
from gkd.driver.checkpoint import State
from gkd.driver.collect import Batches
from gkd.driver.early_stop import EarlyStop
from gkd.driver.saving import Checkpoints
from gkd.driver.streaming import BatchStream
from gkd.driver.val_sets import ValSets
from gkd.driver.validation import Validation
from gkd.driver.weight_sync import WeightSync
from gkd.errors import RunFailed
from gkd.observability import metrics as measured
from gkd.observability.metrics import JsonLines
from gkd.observability.progress import Progress
from gkd.observability.samples import SampleLog
from gkd.observability.timeline import StepStages, Timeline
from gkd.observability.watch import Watcher
from gkd.rollout.group import RolloutGroup
from gkd.rollout.own_answers import OwnAnswers


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything the loop drives, started and holding the same weights."""

    prompts: PromptStream
    rollout: RolloutGroup
    actor: ActorGroup
    sync: WeightSync
    validation: Validation
    val_sets: ValSets
    n_gpus: int
    vocab_size: int
    reports: WorkerReports = field(default_factory=WorkerReports)
    answers: OwnAnswers | None = None
    """What is learned from in place of samples; the engines are then for validation alone."""

    def report(self) -> list[WorkerReport]:
        """Return what the workers of every group say of themselves."""
        return self.reports.read([self.actor.group, self.rollout.living, *self.rollout.scorers.groups])


@dataclass(frozen=True, slots=True)
class RunLog:
    """Where the loop writes what it did."""

    metrics: JsonLines
    samples: SampleLog
    progress: Progress
    checkpoints: Checkpoints
    timeline: Timeline
    best: BestModel | None = None
    stop: EarlyStop | None = None

    @property
    def stopped(self) -> bool:
        """Whether the run ends before its last step."""
        return self.stop is not None and self.stop.reason is not None


def train(config: Config, parts: Parts, log: RunLog, start: State) -> State:
    """Run the steps up to ``trainer.total_steps`` after ``start``, and the validations; returns the state after the
    last one, which ``trainer.stop_early`` may make an earlier one.

    A step is counted, logged, validated and saved only after the actor has been updated and the engines serve its
    weights; where nothing is sampled they get them for validations alone. Where the run ends after the update and
    before that, a checkpoint has what is left to do.

    Samples are logged while the actor computes, and a step's metrics while the engines sample the next one: a step
    begins with the end of the one before, unless that was validated.
    """
    watcher = Watcher(config)
    batches = Batches(config, parts.prompts, parts.answers or parts.rollout, parts.vocab_size, start)
    samples_ahead = config.schedule.max_staleness > 0
    if samples_ahead:
        parts.actor.meanwhile = parts.rollout.attend
        batches.dispatch(start.step)
    state = start if start.row is None else _log(config, parts, log, watcher, start, batches)
    began: float | None = None  # when the step to come was handed out
    for step in _steps(config, log, start.step + 1):
        started = time.monotonic() if began is None else began
        batches.dispatch(step - 1)
        stream = BatchStream(config, parts.actor) if config.streams else None
        collected = batches.collect(step) if stream is None else batches.collect(step, stream.feed)
        parts.actor.beside = partial(log.samples.write, step, collected.batch)
        try:
            require_rewards(config, collected.all)
        except RunFailed:  # why is in the samples
            log.samples.write(step, collected.batch)
            raise
        batch, row = with_advantages(config, collected.batch)
        if config.rollout.horizon.start is not None:
            row["response/limit"] = float(config.rollout.limit_at(step))
        sampled = time.monotonic()
        row |= measured.of_batch(batch, parts.actor.version) | measured.of_stages(collected.requested_s, batch)
        state = replace(
            state, step=step, prompts=parts.prompts.state(), ahead=batches.ahead(step), row=measured.finite(row)
        )
        log.checkpoints.train(state)
        row |= (parts.actor if stream is None else stream).update(batch, step)
        n_tokens, stages = sum(sample.n_tokens for sample in batch), StepStages.of_batch(batch, started)
        del collected, batch, stream  # their arrays leave the object store before the next ones come
        updated = drained = time.monotonic()
        row |= actors_time(started, sampled, updated, row.get("timing_s/update"))
        if samples_ahead and not config.schedule.in_flight:  # every step is sampled from one version
            parts.rollout.drain(config.rollout.timeout_s)
            drained = time.monotonic()
            row["timing_s/drain"] = drained - updated
        if parts.answers is None:
            parts.sync.push()
        done = time.monotonic()
        validates = _is_due(config, step) or parts.val_sets.due(step)
        began = None if validates or config.cluster.offload is True else done  # engines that validate or sleep: later
        if samples_ahead or began is not None:
            batches.dispatch(step)
        row |= {"timing_s/sync": done - drained, "timing_s/step": done - started}
        row |= throughput(n_tokens, done - started, parts.n_gpus)
        reports = parts.report()
        row |= measured.of_memory(reports) | log.timeline.add(step, stages(updated, done), reports)
        state = replace(state, row=measured.finite(row))
        log.checkpoints.train(state)
        state = _log(config, parts, log, watcher, state, batches)
        log.checkpoints.after(parts.actor, state, log.stopped)
    return state


def _steps(config: Config, log: RunLog, first: int) -> Iterator[int]:
    """Yield the steps from ``first`` on, up to the last one or until the run is to end before it."""
    for step in range(first, config.trainer.total_steps + 1):
        if log.stopped:
            return
        yield step


def _is_due(config: Config, step: int) -> bool:
    """Return whether the student is validated after ``step``, besides on sets with intervals of their own."""
    return step % config.trainer.val_every == 0 or step == config.trainer.total_steps


def _log(config: Config, parts: Parts, log: RunLog, watcher: Watcher, state: State, batches: Batches) -> State:
    """Validate, if it is time, and write the metrics of a step that is trained and pushed."""
    step, row = state.step, dict(state.row or {})
    figures = _validate(config, parts, step)
    if log.stop is not None:
        log.stop.look(step, figures)
    if log.stopped:  # a run ends with every figure
        figures |= _validate(config, parts, step, rest=True)
    validated = {**(_of_sets(parts, state.validated) if _is_due(config, step) else state.validated), **figures}
    row |= figures
    log.metrics.write({"step": step, "epoch": batches.epoch(step), **row})
    if log.best is not None:
        log.best.look(step, row, parts.actor)
    log.progress.step(step, row)
    watcher.look(step, row)
    return replace(state, validated=validated, row=None)


def _validate(config: Config, parts: Parts, step: int, rest: bool = False) -> dict[str, float]:
    """Return the figures of validation that are due after ``step``, or those that are not, for the ``rest``."""
    due, of_sets = _is_due(config, step) != rest, parts.val_sets.due(step, rest)
    if parts.answers is not None and (due or of_sets):
        parts.sync.push()
    figures = measured.finite(parts.validation.run()) if due else {}
    return figures | measured.finite(parts.val_sets.run(of_sets))


def actors_time(started: float, sampled: float, updated: float, computed: float | None) -> dict[str, float]:
    """Return timing_s/{wait,update} of a step, and overlap where the actor ``computed`` so long in several chunks.

    The batch was complete at ``sampled``; what the actor computed of it before then overlaps with sampling.
    """
    overlap = min(max(0.0, (computed or 0.0) - (updated - sampled)), sampled - started)
    times = {"timing_s/wait": sampled - started - overlap, "timing_s/update": updated - sampled + overlap}
    return times if computed is None else {**times, "timing_s/overlap": overlap}


def _of_sets(parts: Parts, validated: Mapping[str, float]) -> dict[str, float]:
    """Return the last figures of validation sets, which have intervals of their own."""
    begins = tuple(f"val/{questions.name}/" for questions in parts.val_sets.sets)
    return {name: value for name, value in validated.items() if begins and name.startswith(begins)}


def throughput(n_tokens: int, seconds: float, n_gpus: int) -> dict[str, float]:
    """Return perf/*: tokens a second, prompts' too, also by each of all groups' GPUs, simulated ones included."""
    rate = n_tokens / seconds
    return {"perf/tokens_per_second": rate, "perf/tokens_per_second_per_gpu": rate / n_gpus}
