"""The training loop: sample, score, update, send the weights back, over and over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gkd.algorithms.training_samples import require_fresh, with_advantages
from gkd.cluster.workers.activity import HERE, record_activity
from gkd.config import Config
from gkd.driver.checkpoints.checkpoint import RunState
from gkd.driver.loop.collect import Batches, CollectedBatch
from gkd.driver.loop.parts import Parts, RunLog
from gkd.driver.loop.step_ends import StepEnds
from gkd.driver.loop.streaming import BatchStream
from gkd.errors import RunFailed
from gkd.observability import metrics as measured
from gkd.observability.timeline import StepStages
from gkd.types import TrainingSample


def train(config: Config, parts: Parts, log: RunLog, start: RunState) -> RunState:
    """Run the steps up to ``trainer.total_steps`` after ``start``, and the validations; returns the state after the
    last one, which ``trainer.stop_early`` may make an earlier one.

    A step is counted, logged, validated and saved only after the actor has been updated and the engines serve its
    weights; where nothing is sampled they get them for validations alone. Where the run ends after the update and
    before that, a checkpoint has what is left to do.

    Samples are logged while the actor computes, and a step's metrics while the engines sample the next one: a step
    begins with the end of the one before. The next one is sampled, scored and differentiated beside a validation, too,
    which ends before the optimizer step.
    """
    last = start.step if log.stops_early else config.trainer.total_steps
    batches = Batches(config, parts.prompts, parts.answers or parts.rollout, parts.model.vocabulary, start)
    ends = StepEnds(config, parts, log, batches, start.step)
    if config.schedule.max_staleness > 0:  # samples of later steps come while the actor computes
        parts.actor.meanwhile = parts.rollout.attend
    if start.row is not None:
        _request(config, batches, ends, start.step)
        start = ends.end(start)
    end_last: Callable[[], RunState] = partial(replace, start)  # what is left to do of the step before: nothing
    began: float | None = None  # when the step to come was handed out
    for step in range(start.step + 1, last + 1):
        at = StepTimes(time.monotonic() if began is None else began)
        collected, stream, state = _collect(config, parts, batches, step, end_last)
        at.sampled, validates = time.monotonic(), ends.validates
        state = ends.finish(state)
        if log.stops_early:
            return state
        at.ready = time.monotonic()
        parts.actor.beside = partial(_log_samples, log, step, collected.batch)
        batch, row = _add_advantages(config, log, collected, step)
        row |= at.validation() if validates else {}
        everything = batch + collected.left_out
        drawn = []  # where the data answers
        if parts.answers is None:
            drawn = log.timeline.correct_times(everything, [report.node for report in parts.rollout.group.reports])
        require_fresh(config, batch, parts.actor.version)
        row |= measured.response_metrics(everything) | measured.staleness_metrics(batch, parts.actor.version)
        row |= measured.stage_metrics(collected.requested_s, drawn)
        ahead = batches.prompts_ahead(step)
        state = replace(state, step=step, prompts=parts.prompts.state(), ahead=ahead, row=measured.keep_finite(row))
        log.checkpoints.train(state)
        row |= stream.update(batch, step)
        n_tokens = sum(sample.n_tokens for sample in everything)
        at.generated = max((sample.generated_s for sample in drawn), default=0.0)
        at.scored = max((sample.scored_s for sample in drawn), default=0.0)
        del collected, batch, everything, drawn, stream  # their arrays leave the object store before the next ones come
        at.updated = time.monotonic()
        _push(config, parts, at, partial(_request, config, batches, ends, step))
        began = None if config.cluster.offload is True else at.done
        row |= at.timings(row.get("timing_s/update")) | throughput(n_tokens, at.done - at.started, parts.n_gpus)
        end_last = partial(_log, parts, log, ends, replace(state, row=row), at.stages(validates))
    return ends.finish(end_last())


@dataclass
class StepTimes:
    """When a step began and its parts ended, by ``time.monotonic``: its batch was ``sampled``, a validation beside it
    over (``ready``), the actor ``updated``, and all engines had the weights (``done``). ``drains``: start and end of
    each time within that in which engines sampled what earlier weights were for, if they had to end it. ``generated``
    and ``scored`` (``time.time``): the last of its samples; 0 where the data answers.
    """

    started: float
    sampled: float = 0.0
    ready: float = 0.0
    updated: float = 0.0
    drains: list[tuple[float, float]] | None = None
    done: float = 0.0
    generated: float = 0.0
    scored: float = 0.0

    def validation(self) -> dict[str, float]:
        """Return what the step waited for a validation."""
        return {"timing_s/validation": self.ready - self.sampled}

    def timings(self, computed: float | None) -> dict[str, float]:
        """Return timing_s/* of the whole step, and overlap where the actor ``computed`` so long in several chunks.

        What the actor computed of it before ``ready`` overlaps with sampling.
        """
        waited, updated = self.ready - self.started, self.updated - self.ready
        overlap = min(max(0.0, (computed or 0.0) - updated), waited)
        row = {"timing_s/wait": waited - overlap, "timing_s/update": updated + overlap}
        if computed is not None:
            row["timing_s/overlap"] = overlap
        drained = sum(end - start for start, end in self.drains or ())
        if self.drains is not None:
            row["timing_s/drain"] = drained
        return {**row, "timing_s/sync": self.done - self.updated - drained, "timing_s/step": self.done - self.started}

    def stages(self, validates: bool) -> StepStages:
        """Return the stages of the step, by ``time.time``; ``validates``: a validation was beside it."""
        ahead = time.time() - time.monotonic()
        start, ready, updated, end = (at + ahead for at in (self.started, self.ready, self.updated, self.done))
        drains = tuple((a + ahead, b + ahead) for a, b in self.drains or ())
        return StepStages(start, self.generated, self.scored, updated, end, ready if validates else 0.0, drains)


def _collect(
    config: Config, parts: Parts, batches: Batches, step: int, end_last: Callable[[], RunState]
) -> tuple[CollectedBatch, BatchStream, RunState]:
    """Return a step's samples, the stream that the actor has accumulated them from, as far as it could, and the state
    that ``end_last`` returns: it ends the step before, once the actor has what there is of this one.
    """
    # Without staleness nothing is there yet, and engines that sleep are not woken before the step is logged.
    ended = [] if config.schedule.max_staleness else [end_last()]
    batches.dispatch(step - 1)
    stream = BatchStream(config, parts.actor)

    def take(samples: Sequence[TrainingSample]) -> None:
        if config.streams:
            stream.feed(samples)
        if not ended:
            ended.append(end_last())

    collected = batches.collect(step, take)
    HERE.switch("prepare")  # until the actor computes
    stream.close()
    return collected, stream, ended[0]


def _push(config: Config, parts: Parts, at: StepTimes, request: Callable[[], None]) -> None:
    """Have the engines serve the new weights, and ``request`` what is sampled from them.

    Unless they come in flight, every step is sampled from one version: what is sampled ahead is sampled to its end.
    """
    if config.schedule.max_staleness > 0 and not config.schedule.in_flight:
        at.drains = parts.sync.push_drained(request)
        at.done = time.monotonic()
        return
    if parts.answers is None:
        parts.sync.push()
        at.done = time.monotonic()
    request()  # where the data answers, it pushes for a validation
    at.done = at.done or time.monotonic()


def _add_advantages(
    config: Config, log: RunLog, collected: CollectedBatch, step: int
) -> tuple[list[TrainingSample], dict[str, float]]:
    """Return the batch with its advantages, and what these and its settings measure.

    Raises RunFailed where rewards failed on too many samples, of which those are logged, or the batch where none did.
    """
    try:
        batch, row = with_advantages(config, collected.batch, collected.left_out)
    except RunFailed:  # why is in the samples
        log.samples.write(step, collected.failed or collected.batch)
        raise
    if config.rollout.horizon.start is not None:
        row["response/limit"] = float(config.rollout.limit_at(step))
    return batch, row


def _log_samples(log: RunLog, step: int, samples: Sequence[TrainingSample]) -> None:
    """Log samples while the actor computes; then the driver waits for it."""
    HERE.switch("log samples")
    log.samples.write(step, samples)
    HERE.switch(None)


@record_activity("request")
def _request(config: Config, batches: Batches, ends: StepEnds, step: int) -> None:
    """Request what is measured after ``step``, and samples that may be drawn from its weights.

    First what is waited for first: samples of the next step, the validation, those of later steps.
    """
    if config.cluster.offload is True:  # engines that sleep are not woken before the step is logged
        ends.validate(step)
    elif config.schedule.max_staleness:  # those of the next step were requested before
        ends.validate(step)
        batches.dispatch(step)
    else:
        batches.dispatch(step)
        ends.validate(step)


@record_activity("log")
def _log(parts: Parts, log: RunLog, ends: StepEnds, state: RunState, stages: StepStages) -> RunState:
    """Add what the workers report to a step's row, and log and save it unless its validation is under way."""
    reports = parts.report()
    row = {**(state.row or {}), **measured.memory_metrics(reports)}
    row |= log.timeline.add(state.step, stages, reports, HERE.take()[1])
    state = replace(state, row=measured.keep_finite(row))
    log.checkpoints.train(state)
    return ends.end(state)


def throughput(n_tokens: int, seconds: float, n_gpus: int) -> dict[str, float]:
    """Return perf/*: tokens a second, prompts' too, also by each of all groups' GPUs, simulated ones included."""
    rate = n_tokens / seconds
    return {"perf/tokens_per_second": rate, "perf/tokens_per_second_per_gpu": rate / n_gpus}
