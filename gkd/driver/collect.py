"""One step's samples: prompts to the engines, scored samples back, again until the batch is full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TypeVar

from gkd.algorithms.advantages import groups_that_differ
from gkd.algorithms.top_k import top_k_wanted
from gkd.algorithms.training_samples import groups_of, rewards_of
from gkd.config import Config
from gkd.data.stream import PromptStream
from gkd.rollout.group import RolloutGroup
from gkd.types import Prompt, SampleRequest, Sampling, Scoring, TrainingSample, seed_of

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Collected:
    """Samples of one step: the ``batch``, and those that dynamic sampling left out of it."""

    batch: list[TrainingSample]
    left_out: list[TrainingSample]

    @property
    def all(self) -> list[TrainingSample]:
        """Every sample of the step; a reward that fails on those left out fails as well."""
        return self.batch + self.left_out


def collect(
    config: Config,
    prompts: PromptStream,
    rollout: RolloutGroup,
    vocab_size: int,
    step: int,
    take: Callable[[Sequence[TrainingSample]], None] = lambda samples: None,
) -> Collected:
    """Collect scored samples of ``trainer.batch_size`` prompts, ``rollout.n`` neighbours each.

    With dynamic sampling, groups whose rewards are all equal make room for those of further prompts, for
    ``algorithm.dynamic_sampling.max_rounds`` rounds; what is then still missing is filled with such groups, evenly
    among the others. A group whose rewards failed is one of them. ``take`` is given the samples in the batch's order as
    they come.
    """
    scoring = scoring_of(config, vocab_size)
    batch, rounds = config.trainer.batch_size, config.algorithm.dynamic_sampling.max_rounds
    useful: list[list[TrainingSample]] = []
    spare: list[list[TrainingSample]] = []
    for round_ in range(rounds if config.algorithm.policy_weight else 1):
        drawn = prompts.take(batch - len(useful))
        requests = requests_of(config, drawn, scoring, step, first=round_ * batch)
        samples = []
        for arrived in rollout.in_order(rollout.submit(requests), config.rollout.timeout_s):
            take(arrived)
            samples += arrived
        if rounds == 1 or not config.algorithm.policy_weight:
            return Collected(samples, [])
        groups = groups_of(config, samples)
        differ = groups_that_differ(rewards_of(config, samples), groups)
        for group, neighbours in groupby(zip(groups, samples, strict=True), key=itemgetter(0)):
            (useful if group in differ else spare).append([sample for _, sample in neighbours])
        if len(useful) == batch:
            break
    n_missing = batch - len(useful)
    return Collected(_flat(spread(useful, spare[:n_missing])), _flat(spare[n_missing:]))


def _flat(groups: Sequence[Sequence[Item]]) -> list[Item]:
    return [item for group in groups for item in group]


def spread(most: Sequence[Item], others: Sequence[Item]) -> list[Item]:
    """Merge both, each in its order, with ``others`` at even distances, so that every mini-batch has its share."""
    n = len(most) + len(others)
    places = {int((i + 0.5) * n / len(others)) for i in range(len(others))}
    rest, fill = iter(most), iter(others)
    return [next(fill if place in places else rest) for place in range(n)]


def scoring_of(config: Config, vocab_size: int) -> Scoring:
    """Return which scorers a training sample goes to."""
    algorithm = config.algorithm
    return Scoring(
        top_k=top_k_wanted(config, vocab_size) if algorithm.needs_teacher else None,
        temperature=algorithm.loss.temperature if algorithm.distils else config.rollout.temperature,
        reference=config.asks_reference,
        rewards=algorithm.policy_weight > 0,
    )


def requests_of(
    config: Config, prompts: Sequence[Prompt], scoring: Scoring, step: int, first: int = 0
) -> list[SampleRequest]:
    """Return ``rollout.n`` requests a prompt, each with a seed that depends on nothing but its place in the run.

    ``first``: the place in the step of the first of these prompts. The share of them that the data answers instead of
    the student is rounded over the steps together, so that it holds for small batches as well. Those come first; where
    the batch is cut into mini-batches they are spread, so that every update learns from both kinds.
    """
    share = len(prompts) * (1 - config.algorithm.on_policy_share)
    n_own = int(step * share + 0.5) - int((step - 1) * share + 0.5)
    size = config.actor.mini_batch_size or len(prompts) * config.rollout.n
    by_student, own = [False] * (len(prompts) - n_own), [True] * n_own
    is_own = spread(by_student, own) if size < len(prompts) * config.rollout.n else own + by_student
    sampling = Sampling(config.rollout.max_response_length, config.rollout.temperature, config.rollout.top_p)
    return [
        SampleRequest(
            prompt, index, seed_of(config.trainer.seed, step, place, index), sampling, scoring, is_own[place - first]
        )
        for place, prompt in enumerate(prompts, start=first)
        for index in range(config.rollout.n)
    ]
