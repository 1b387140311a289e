"""Computes the policy-gradient loss on rewards, for every algorithm that has one."""

from __future__ import annotations

import torch
from torch import Tensor

from gkd.config import Algorithm, Rollout
from gkd.losses import MIN_LOGPROB
from gkd.losses import policy_gradient as pg
from gkd.losses.chunked import Values, require_values
from gkd.losses.micro_batch import MicroBatch
from gkd.losses.off_policy import Importance
from gkd.losses.outcomes import outcomes
from gkd.losses.surrogate import Surrogate
from gkd.losses.truncation import apply_presence_penalty, log_mass, truncates


def values_at(
    logits: Tensor, start: int, micro: MicroBatch, rollout: Rollout | None = None, with_entropy: bool = True
) -> Values:
    """Compute the response tokens' log-probabilities, differentiable, and the entropy of each position, detached.

    logits [n, V] of the positions from ``start`` on; both are [n]. With ``rollout``, the log-probabilities are of the
    distribution that was sampled from: softmax(logits / temperature), after the presence penalty and normalised over
    the tokens that its truncation leaves (:mod:`gkd.losses.truncation`); the entropy is that of all tokens. Without,
    both are the plain model's.
    """
    tokens, temperature = micro.response_ids[start : start + len(logits), None], 1.0
    if rollout is not None:
        temperature = rollout.temperature
        logits = apply_presence_penalty(logits, start, micro.response_ids, micro.bounds, rollout.presence_penalty)
    if rollout is None or not truncates(rollout):
        outcome = outcomes(logits, tokens, temperature)
        return {"token_logprobs": outcome.logprobs[:, 0], "entropy": outcome.entropy}
    log_q = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, -1)
    values: Values = {}
    if with_entropy:  # two passes over [n, V] more
        with torch.no_grad():
            values["entropy"] = torch.special.entr(log_q.exp()).sum(-1)
    return {"token_logprobs": log_q.gather(-1, tokens)[:, 0] - log_mass(log_q, rollout), **values}


def token_logprobs(logits: Tensor, start: int, micro: MicroBatch, rollout: Rollout | None = None) -> Tensor:
    """Compute the log-probabilities [n] of :func:`values_at` alone."""
    return values_at(logits, start, micro, rollout, with_entropy=False)["token_logprobs"]


def policy_loss(micro: MicroBatch, log_q: Tensor, algorithm: Algorithm, weights: Importance) -> tuple[Tensor, Values]:
    """Compute the surrogate at each of N response tokens, not yet weighted, and what is worth watching; [N] each."""
    old, advantages, by_token = weights.old, micro.advantages, algorithm.advantage.teacher_kl > 0
    surrogate: Surrogate = algorithm.policy.build(pg.USUAL_RANGES[algorithm.ratio])
    if by_token:
        assert micro.targets is not None, "the teacher's KL needs the teacher's targets"
        teacher = micro.targets.teacher_token_logprobs.clamp(min=MIN_LOGPROB)
        advantages = advantages - algorithm.advantage.teacher_kl * (old - teacher)
    ratio = pg.ratio_of(pg.log_ratio(algorithm.ratio, log_q, old, micro.bounds, by_token))
    more = {"reference": micro.reference_logprobs} if surrogate.needs_reference else {}
    values, clipped = surrogate(log_q, ratio, advantages, **more), surrogate.clips(ratio.detach())
    require_values(values, len(log_q), log_q, f"algorithm.policy.surrogate={algorithm.policy.surrogate}")
    require_values(
        clipped, len(log_q), ratio.detach(), f"algorithm.policy.surrogate={algorithm.policy.surrogate}: clips"
    )
    factors = weights.importance_weights
    limit = algorithm.policy.sequence_mask_kl
    if limit is not None:
        factors = factors * pg.sequence_mask(log_q, weights.sampler, advantages, micro.bounds, limit)
    return values * factors, {"actor/clip_fraction": clipped.float(), "actor/importance_weight": factors}
