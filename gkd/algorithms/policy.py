"""The policy-gradient loss on rewards, for every algorithm that has one."""

from __future__ import annotations

import torch
from torch import Tensor

from gkd.actor.packing import MicroBatch
from gkd.algorithms import grpo, gspo
from gkd.config import Algorithm, Rollout
from gkd.losses import policy_gradient as pg
from gkd.losses.chunked import Values
from gkd.losses.divergence import MIN_LOGPROB

_LOG_RATIO = {"on_policy_distill": grpo.log_ratio, "grpo": grpo.log_ratio, "gspo": gspo.log_ratio}


def values_at(logits: Tensor, start: int, micro: MicroBatch, temperature: float) -> Values:
    """The response tokens' log-probabilities, differentiable, and the entropy of each position, detached.

    logits [n, V] of the positions from ``start`` on; both of softmax(logits / ``temperature``), what was sampled from.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_q = torch.log_softmax(logits, -1)
    chosen = log_q.gather(-1, micro.response_ids[start : start + len(logits), None])[:, 0]
    with torch.no_grad():
        entropy = torch.special.entr(log_q.exp()).sum(-1)
    return {"token_logprobs": chosen, "entropy": entropy}


@torch.no_grad()
def as_sampled(logits: Tensor, start: int, micro: MicroBatch, rollout: Rollout) -> Tensor:
    """Log-probabilities [n] of the response tokens under the distribution that was sampled from.

    That is softmax(logits / ``rollout.temperature``), normalised over the nucleus of ``rollout.top_p``: the most likely
    tokens, as few as have that much together.
    """
    log_q = torch.log_softmax(logits.float() / rollout.temperature, -1)
    chosen = log_q.gather(-1, micro.response_ids[start : start + len(logits), None])[:, 0]
    if rollout.top_p == 1.0:
        return chosen
    falling = log_q.exp().sort(-1, descending=True).values
    before = falling.cumsum(-1) - falling
    return chosen - (falling * (before < rollout.top_p)).sum(-1).log()


def policy_loss(micro: MicroBatch, log_q: Tensor, algorithm: Algorithm) -> tuple[Tensor, Values]:
    """The surrogate at each of N response tokens, [N], not yet weighted, and what is worth watching, [N] each."""
    old = log_q.detach() if micro.old_logprobs is None else micro.old_logprobs
    advantages = micro.advantages
    if algorithm.advantage.teacher_kl:
        assert micro.targets is not None, "the teacher's KL needs the teacher's targets"
        teacher = micro.targets.teacher_token_logprobs.clamp(min=MIN_LOGPROB)
        advantages = advantages - algorithm.advantage.teacher_kl * (old - teacher)
    ratio = pg.ratio_of(_LOG_RATIO[algorithm.name](log_q, old, micro.bounds))
    low, high = algorithm.clip
    if algorithm.policy.surrogate == "cispo":
        values = pg.cispo(log_q, ratio, advantages, low, high)
    else:
        values = pg.clipped(ratio, advantages, low, high)
    factors = torch.ones_like(values)
    if algorithm.correction.level is not None:
        how = algorithm.correction
        assert how.level is not None
        factors = pg.correction(old, micro.sampler_logprobs, micro.bounds, how.level, how.mask, how.cap)
    limit = algorithm.policy.sequence_mask_kl
    if limit is not None:
        factors = factors * pg.sequence_mask(log_q, old, advantages, micro.bounds, limit)
    outside = (ratio.detach() < 1 - low) | (ratio.detach() > 1 + high)
    return values * factors, {"actor/clip_fraction": outside.float(), "actor/correction": factors}
