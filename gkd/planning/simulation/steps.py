"""The steps of a layout: what its groups take (:mod:`gkd.planning.simulation.stages`), simulated together.

A batch is simulated by at most so many samples that a plan answers at once; each then stands for several, and an engine
for several engines, as these are alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean

import numpy as np

from gkd.config import RewardModel, Scorer
from gkd.config.cluster import TRANSFERS
from gkd.config.groups import OVERBOOKED
from gkd.planning.layout import Layout, engine_class
from gkd.planning.memory.colocation import needs_offload
from gkd.planning.memory.pools import (
    count_concurrent_sequences,
    samples_a_prompt,
    slots_of,
    tokens_of_full_micro_batch,
)
from gkd.planning.simulation.events import simulate
from gkd.planning.simulation.run import SamplingGroup, ScoringGroup, SimulatedRun, Step, TrainingGroup
from gkd.planning.simulation.stages import (
    Factors,
    adam_s,
    decode_s,
    device_shares,
    prefill_s,
    score_one_s,
    stages_of,
    sync_s,
    update_s,
)
from gkd.planning.transfer import transfer_of

MOST_SAMPLES = 256  # of a batch that are simulated, each by itself
MOST_ENGINES = 16  # or as many as it takes for each to have samples


def simulate_layout(layout: Layout, staleness: int, factors: Factors | None = None) -> Step:
    """Return a step of a layout at ``schedule.max_staleness``, its other settings as they are."""
    factors = factors or Factors()
    if layout.config.algorithm.is_supervised:  # nothing is sampled
        update = factors.apply(stages_of(layout)).update
        return Step(staleness, update + factors.driver.seconds, {"actor": update, "rollout": 0.0}, "actor")
    return simulate(run_of(layout, staleness, factors))


def streams(layout: Layout) -> bool:
    """Return whether the actor accumulates gradients of a batch that is being sampled."""
    config = layout.config
    return config.streams and (config.schedule.streaming is True or not needs_offload(layout))


def run_of(layout: Layout, staleness: int, factors: Factors) -> SimulatedRun:
    """Return what is simulated for a layout."""
    config, workload, scale = layout.config, layout.workload, _Scale.from_layout(layout)
    trainer, schedule, world = config.trainer, config.schedule, config.trainer.n_workers
    adam = adam_s(layout, world) * factors.update
    chunk = tokens_of_full_micro_batch(layout, world) * world / scale.weight if streams(layout) else None
    n_samples = scale.n_prompts * scale.n
    measured_lengths = factors.measured_lengths if config.plan.response_length == factors.response else ()
    return SimulatedRun(
        n_prompts=scale.n_prompts,
        n=scale.n,
        prompt=workload.prompt,
        mean_tokens=workload.prompt + fmean(response_lengths(layout, n_samples, 1, measured_lengths)),
        lengths=lambda step: response_lengths(layout, n_samples, step, measured_lengths),
        sampling=_sampling_group(layout, scale, factors),
        scoring=_scoring_groups(layout, scale, factors),
        updating=TrainingGroup(
            accumulate_s=update_s(layout, world, trainer.nnodes) * factors.update - adam,
            apply_s=adam,
            sync_s=sync_s(layout, world, trainer.nnodes) * factors.sync,
            chunk_tokens=chunk,
            unit=scale.n if config.algorithm.policy_weight else 1,
            samples_a_prompt=samples_a_prompt(layout, world),
        ),
        max_staleness=staleness,
        in_flight=schedule.in_flight and staleness > 0,
        together=TRANSFERS.load(transfer_of(layout)).collective,
        hosts=layout.hosts,
        at_once=layout.groups_at_once,
        shares=device_shares(layout),
        driver=factors.driver,
        paces=factors.paces,
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    """Holds how coarse a batch is simulated: ``weight`` samples each is for, ``n_prompts`` of ``n`` that are left."""

    n_prompts: int
    n: int
    weight: float

    @classmethod
    def from_layout(cls, layout: Layout) -> _Scale:
        workload, n = layout.workload, min(layout.config.rollout.n, MOST_SAMPLES)
        n_prompts = max(1, min(workload.prompts, MOST_SAMPLES // n))
        return cls(n_prompts, n, workload.samples / (n_prompts * n))

    def servers(self, n: int) -> tuple[int, float]:
        """Return how many are simulated in place of ``n``, and the samples of each that a simulated one stands for."""
        simulated = min(n, max(MOST_ENGINES, math.ceil(n / self.weight)))
        return simulated, self.weight * simulated / n


def _sampling_group(layout: Layout, scale: _Scale, factors: Factors) -> SamplingGroup:
    engine, share = layout.config.rollout, layout.config.algorithm.on_policy_share * factors.generate
    n_engines, each = scale.servers(engine.n_engines)
    workload, schedule = layout.workload, layout.config.schedule
    prompt_s = prefill_s(layout, engine)
    prefill = prompt_s * workload.prompts / workload.samples
    recompute = prompt_s / workload.prompt if schedule.in_flight and schedule.recompute_cache else 0.0

    @cache
    def token_s(n: float) -> float:
        return decode_s(layout, engine, n * each) * share

    return SamplingGroup(
        n_engines,
        capacity=max(1, round(slots_of(layout, "rollout", engine) / each)),
        running=max(1, round(count_concurrent_sequences(layout, "rollout", engine) / each)),
        token_s=token_s,
        prefill_s=prefill * each * share,
        recompute_s=recompute * each * share,
        continuous=engine_class(engine, layout.models.student).continuous,
    )


def _scoring_groups(layout: Layout, scale: _Scale, factors: Factors) -> dict[str, ScoringGroup]:
    scoring = {}
    for group, pool in layout.config.groups().items():
        if not isinstance(pool, Scorer | RewardModel):
            continue
        shape, n_tokens = layout.models.shape_of(group), 0
        if isinstance(pool, Scorer):
            n_tokens = engine_class(pool, shape).pass_tokens[layout.device]
        n_servers, each = scale.servers(pool.n_engines)
        scoring[group] = ScoringGroup(
            n_servers,
            score_one_s(layout, group, pool) * each * factors.score,
            a_pass=max(1, int(n_tokens / layout.workload.length / each)),
            held=max(1, round(OVERBOOKED * pool.max_num_seqs / each)),
        )
    return scoring


def response_lengths(layout: Layout, n: int, step: int, measured_lengths: Sequence[int] = ()) -> list[float]:
    """Return the tokens of ``n`` responses, in the order in which they are requested.

    Lognormal around ``plan.response_length``, cut at the limit, the longest as long as that of a whole batch; the same
    ones in every step, in another order. All as long as the limit where ``plan.response_length`` is not given.
    Distributed as those ``measured_lengths``, where there are any, and cut at the limit, too.
    """
    workload, config = layout.workload, layout.config
    spread = config.plan.response_spread if config.plan.response_length else 0.0
    limit = config.rollout.max_response_length
    lengths = _distribute(tuple(measured_lengths), workload.response, limit, spread, n, workload.samples)
    return [lengths[i] for i in np.random.default_rng(step).permutation(n)]


@cache
def _distribute(
    measured_lengths: tuple[int, ...], mean: float, limit: float, spread: float, n: int, n_real: int
) -> tuple[float, ...]:
    """Return ``n`` lengths of a distribution, from short to long, the last as long as the longest of ``n_real``."""
    if not measured_lengths and (not spread or mean >= limit):
        return (mean,) * n
    shares = [(i + 0.5) / n for i in range(n - 1)] + [1 - 0.5 / n_real]
    if measured_lengths:
        drawn = np.quantile(measured_lengths, shares, method="inverted_cdf")
        return tuple(float(length) for length in np.minimum(drawn, limit))
    drawn = np.exp(spread * np.array([NormalDist().inv_cdf(share) for share in shares]))
    low, high = 0.0, limit / drawn.min()
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(drawn * middle, limit).mean() < mean else (low, middle)
    return tuple(float(length) for length in np.maximum(1.0, np.minimum(drawn * high, limit)))
