"""Samples of every step: prompts to the engines, scored samples back, again until a batch is full."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from typing import Protocol, TypeVar

from gkd.algorithms.advantages import groups_that_differ
from gkd.algorithms.training_samples import groups_of, rewards_of
from gkd.cluster.workers.activity import record_activity
from gkd.config import Config, Rollout
from gkd.config.top_k import required_top_k
from gkd.data.stream import PromptStream
from gkd.driver.checkpoints.checkpoint import RunState
from gkd.schedule import Ticket, TicketSchedule
from gkd.types import Prompt, SampleRequest, Sampling, Scoring, TrainingSample, seed_of

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class CollectedBatch:
    """Samples of one step: the ``batch``, and those that dynamic sampling left out of it.

    ``requested_s``: when they were requested (``time.time``).
    """

    batch: list[TrainingSample]
    left_out: list[TrainingSample]
    requested_s: float

    @property
    def failed(self) -> list[TrainingSample]:
        """Samples on which a reward failed, of those left out as well."""
        samples = self.batch + self.left_out
        return [sample for sample in samples if any(isinstance(reward, str) for reward in sample.rewards.values())]


class SampleSource(Protocol):
    """Source of samples: engines (:class:`gkd.rollout.group.RolloutGroup`), or the data's own answers."""

    def submit(self, requests: Sequence[SampleRequest], order: int = 0) -> list[int]:
        """Queue requests for step ``order``; returns their keys."""

    def collect_in_order(self, keys: Sequence[int], timeout_s: float) -> Iterator[list[TrainingSample]]:
        """Yield the samples of ``keys`` in this order, as they come; none, at first, where none is there."""


class Batches:
    """Has the engines sample what the schedule admits, and collects it step by step.

    ``source`` gives the samples; ``start`` is where the run begins or goes on.
    """

    def __init__(
        self, config: Config, prompts: PromptStream, source: SampleSource, vocab_size: int, start: RunState
    ) -> None:
        self.config, self.prompts, self.source = config, prompts, source
        self.schedule = TicketSchedule(
            config.trainer.batch_size,
            config.schedule.max_staleness,
            config.trainer.total_steps,
            prompts.draw,
            start.step,
            dict(start.ahead),
        )
        self._scoring = scoring_of(config, vocab_size)
        self._keys: dict[int, list[int]] = {}  # of the first round of each step that is not collected
        self._requested: dict[int, float] = {}

    @record_activity("request")
    def dispatch(self, version: int) -> None:
        """Request what may be sampled now that the engines have the weights of ``version``."""
        for tickets in self.schedule.admit(version):
            step = tickets[0].step
            self._requested[step] = time.time()
            self._keys[step] = self._submit(tickets)

    def _submit(self, tickets: Sequence[Ticket]) -> list[int]:
        step, place = tickets[0].step, tickets[0].place
        prompts = [self.prompts.prompt_at(ticket.prompt) for ticket in tickets]
        return self.source.submit(requests_of(self.config, prompts, self._scoring, step, first=place), order=step)

    def prompts_ahead(self, step: int) -> list[tuple[int, list[int]]]:
        """Return what a checkpoint of ``step`` needs of the steps after it (:meth:`TicketSchedule.steps_ahead`)."""
        return list(self.schedule.steps_ahead(step).items())

    def epoch(self, step: int) -> float:
        """Return passes over the prompts up to ``step``."""
        return self.prompts.epoch_without(len(self.schedule.steps_ahead(step)) * self.config.trainer.batch_size)

    def collect(
        self, step: int, take: Callable[[Sequence[TrainingSample]], None] = lambda samples: None
    ) -> CollectedBatch:
        """Collect scored samples of ``trainer.batch_size`` prompts, ``rollout.n`` neighbours each.

        With dynamic sampling, groups whose rewards are all equal make room for those of further prompts, for
        ``algorithm.dynamic_sampling.max_rounds`` rounds; what is then still missing is filled with such groups, evenly
        among the others. A group whose rewards failed is one of them. ``take`` is given the samples in the batch's
        order as they come; none, at first, where none is there.
        """
        config, requested = self.config, self._requested.pop(step)
        batch, rounds = config.trainer.batch_size, config.algorithm.dynamic_sampling.max_rounds
        useful: list[list[TrainingSample]] = []
        spare: list[list[TrainingSample]] = []
        keys = self._keys.pop(step)
        while True:
            samples = []
            for arrived in self.source.collect_in_order(keys, config.rollout.timeout_s):
                take(arrived)
                samples += arrived
            rounds -= 1
            if not config.algorithm.policy_weight or config.algorithm.dynamic_sampling.max_rounds == 1:
                return CollectedBatch(samples, [], requested)
            groups = groups_of(config, samples)
            differ = groups_that_differ(rewards_of(config, samples), groups)
            for group, neighbours in groupby(zip(groups, samples, strict=True), key=itemgetter(0)):
                (useful if group in differ else spare).append([sample for _, sample in neighbours])
            n_missing = batch - len(useful)
            if not n_missing or not rounds:
                batch_samples = list(chain.from_iterable(interleave(useful, spare[:n_missing])))
                return CollectedBatch(batch_samples, list(chain.from_iterable(spare[n_missing:])), requested)
            keys = self._submit(self.schedule.replace(step, n_missing))


def interleave(most: Sequence[Item], others: Sequence[Item]) -> list[Item]:
    """Merge both, each in its order, with ``others`` at even distances, so that every mini-batch has its share."""
    n = len(most) + len(others)
    places = {int((i + 0.5) * n / len(others)) for i in range(len(others))}
    rest, fill = iter(most), iter(others)
    return [next(fill if place in places else rest) for place in range(n)]


def scoring_of(config: Config, vocab_size: int) -> Scoring:
    """Return which scorers a training sample goes to."""
    algorithm = config.algorithm
    return Scoring(
        top_k=required_top_k(config, vocab_size) if algorithm.needs_teacher else None,
        temperature=algorithm.loss.temperature if algorithm.distils else config.rollout.temperature,
        reference=config.has_reference_group,
        rewards=algorithm.policy_weight > 0,
        group_size=config.rollout.n if config.has_group_rewards else 1,
    )


def sampling_of(rollout: Rollout, step: int) -> Sampling:
    """Return how responses of training ``step`` are drawn."""
    return Sampling(
        rollout.limit_at(step),
        rollout.temperature,
        rollout.top_p,
        rollout.top_k,
        rollout.min_p,
        rollout.presence_penalty,
        tuple(rollout.stop),
    )


def requests_of(
    config: Config, prompts: Sequence[Prompt], scoring: Scoring, step: int, first: int = 0
) -> list[SampleRequest]:
    """Return ``rollout.n`` requests a prompt, each with a seed that depends on nothing but its place in the run.

    ``first``: the place in the step of the first of these prompts. The share of them that the data answers instead of
    the student is rounded over the steps together, so that it holds for small batches as well. Those come first; where
    the batch is cut into mini-batches they are interleaved, so that every update learns from both kinds.
    """
    share = len(prompts) * (1.0 if config.algorithm.is_supervised else 1 - config.algorithm.on_policy_share)
    n_own = int(step * share + 0.5) - int((step - 1) * share + 0.5)
    size = config.actor.mini_batch_size or len(prompts) * config.rollout.n
    by_student, by_data = [False] * (len(prompts) - n_own), [True] * n_own
    is_own = interleave(by_student, by_data) if size < len(prompts) * config.rollout.n else by_data + by_student
    sampling = sampling_of(config.rollout, step)
    return [
        SampleRequest(
            prompt, index, seed_of(config.trainer.seed, step, place, index), sampling, scoring, is_own[place - first]
        )
        for place, prompt in enumerate(prompts, start=first)
        for index in range(config.rollout.n)
    ]
