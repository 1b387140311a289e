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


def values_at(logits: Tensor, start: int, micro: MicroBatch, rollout: Rollout) -> Values:
    """Compute the response tokens' log-probabilities, differentiable, and the entropy of each position, detached.

    logits [n, V] of the positions from ``start`` on. The log-probabilities are of the distribution that was sampled
    from (:func:`token_logprobs`), the entropies of softmax(logits / ``rollout.temperature``).
    """
    logits, tokens = _penalise(logits, start, micro, rollout), _tokens(logits, start, micro)
    if not truncates(rollout):
        outcome = outcomes(logits, tokens, rollout.temperature)
        return {"token_logprobs": outcome.chosen[:, 0], "entropy": outcome.entropy}
    log_q = _log_softmax(logits, rollout.temperature)
    with torch.no_grad():
        entropy = torch.special.entr(log_q.exp()).sum(-1)
    return {"token_logprobs": _truncated_logprobs(log_q, tokens, rollout), "entropy": entropy}


def plain_values_at(logits: Tensor, start: int, micro: MicroBatch) -> Values:
    """Compute the same under the plain model, softmax(logits)."""
    outcome = outcomes(logits, _tokens(logits, start, micro))
    return {"token_logprobs": outcome.chosen[:, 0], "entropy": outcome.entropy}


def token_logprobs(logits: Tensor, start: int, micro: MicroBatch, rollout: Rollout | None = None) -> Tensor:
    """Compute log-probabilities [n] of the response tokens from ``start`` on, differentiable; logits [n, V].

    With ``rollout``, under the distribution that was sampled from: softmax(logits / temperature), after the presence
    penalty and normalised over the tokens that its truncation leaves (:mod:`gkd.losses.truncation`). Without, under the
    plain model.
    """
    tokens = _tokens(logits, start, micro)
    if rollout is None:
        return outcomes(logits, tokens).chosen[:, 0]
    logits = _penalise(logits, start, micro, rollout)
    if not truncates(rollout):
        return outcomes(logits, tokens, rollout.temperature).chosen[:, 0]
    return _truncated_logprobs(_log_softmax(logits, rollout.temperature), tokens, rollout)


def _tokens(logits: Tensor, start: int, micro: MicroBatch) -> Tensor:
    """Return the response tokens from ``start`` on, [n, 1]."""
    return micro.response_ids[start : start + len(logits), None]


def _penalise(logits: Tensor, start: int, micro: MicroBatch, rollout: Rollout) -> Tensor:
    return apply_presence_penalty(logits, start, micro.response_ids, micro.bounds, rollout.presence_penalty)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, -1)


def _truncated_logprobs(log_q: Tensor, tokens: Tensor, rollout: Rollout) -> Tensor:
    return log_q.gather(-1, tokens)[:, 0] - log_mass(log_q, rollout)


def policy_loss(micro: MicroBatch, log_q: Tensor, algorithm: Algorithm, weights: Importance) -> tuple[Tensor, Values]:
    """Compute the surrogate at each of N response tokens, not yet weighted, and what is worth watching; [N] each."""
    old, advantages, by_token = weights.old, micro.advantages, algorithm.advantage.teacher_kl > 0
    surrogate: Surrogate = algorithm.policy.build(pg.USUAL_RANGES[algorithm.ratio])
    if by_token:
        assert micro.targets is not None, "the teacher's KL needs the teacher's targets"
        teacher = micro.targets.teacher_token_logprobs.clamp(min=MIN_LOGPROB)
        advantages = advantages - algorithm.advantage.teacher_kl * (old - teacher)
    ratio = pg.ratio_of(pg.log_ratio(algorithm.ratio, log_q, old, micro.bounds, by_token))
    values, clipped = surrogate(log_q, ratio, advantages), surrogate.clips(ratio.detach())
    require_values(values, len(log_q), log_q, f"algorithm.policy.surrogate={algorithm.policy.surrogate}")
    require_values(
        clipped, len(log_q), ratio.detach(), f"algorithm.policy.surrogate={algorithm.policy.surrogate}: clips"
    )
    factors = weights.importance_weights
    limit = algorithm.policy.sequence_mask_kl
    if limit is not None:
        factors = factors * pg.sequence_mask(log_q, weights.sampler, advantages, micro.bounds, limit)
    return values * factors, {"actor/clip_fraction": clipped.float(), "actor/importance_weight": factors}
