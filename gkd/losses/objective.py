"""Puts the loss of a micro-batch together: distillation, policy gradient, penalty, whichever the algorithm has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gkd.config import Algorithm, Config, Rollout
from gkd.losses import policy
from gkd.losses.chunked import HeadFn, Values, differentiate_in_chunks, evaluate_in_chunks
from gkd.losses.micro_batch import MicroBatch
from gkd.losses.off_policy import importance
from gkd.losses.policy_gradient import kl_penalty
from gkd.losses.position import position_losses

SAMPLED, GIVEN = "sampled_share", "given_share"
"""Tokens that the student sampled and those of the data's own answers, 1 or 0 each: metrics of one kind alone are to be
divided by their sums."""


@dataclass(frozen=True, slots=True)
class MicroBatchMetrics:
    """Metrics of a micro-batch by name: shares of the batch's ``losses``, ``sums`` over tokens, and ``largest``."""

    losses: Values = field(default_factory=dict)
    sums: Values = field(default_factory=dict)
    largest: Values = field(default_factory=dict)


Objective = Callable[[Tensor, HeadFn], tuple[Tensor, MicroBatchMetrics]]


def objective(micro: MicroBatch, algorithm: Algorithm, rollout: Rollout, chunk: int, roomy: bool = False) -> Objective:
    """Return what the student minimises on ``micro``: the weighted sum of its tokens' losses.

    The head sees ``chunk`` positions at a time; ``roomy``: what comes after it may take more memory. Distillation
    compares at ``algorithm.loss.temperature``, the supervised loss is at temperature 1, and everything that looks at
    tokens that the student sampled is under the distribution that they were sampled from, weighted by
    :mod:`gkd.losses.off_policy`.
    """
    as_sampled = algorithm.distils and not algorithm.needs_policy and not rollout.is_plain

    def values_at(logits: Tensor, start: int) -> Values:
        values: Values = {}
        if algorithm.distils:
            assert micro.targets is not None, "distillation needs the teacher's targets"
            losses = position_losses(logits, micro.targets.rows(start, start + len(logits)), algorithm.loss)
            values |= {"distill": losses.loss, **losses.diagnostics()}
        if algorithm.needs_policy:
            values |= policy.values_at(logits, start, micro, rollout)
        if algorithm.is_supervised:
            values |= policy.values_at(logits, start, micro)
            values["supervised"] = -values["token_logprobs"]
        elif algorithm.supervised_weight:
            values["supervised"] = -policy.token_logprobs(logits, start, micro)
        if as_sampled:
            with torch.no_grad():
                values["as_sampled"] = policy.token_logprobs(logits, start, micro, rollout)
        return values

    def evaluate(hidden: Tensor, head: HeadFn) -> tuple[Tensor, MicroBatchMetrics]:
        gradients = None
        if torch.is_grad_enabled():
            share = _share(micro, algorithm, rollout, hidden, head, chunk, roomy)

            def with_share(logits: Tensor, start: int) -> tuple[Tensor, Values]:
                values = values_at(logits, start)
                return share(values, start), values

            values, gradients = differentiate_in_chunks(hidden, head, with_share, chunk, roomy)
        else:
            values = evaluate_in_chunks(hidden, head, values_at, chunk, roomy)
        with torch.no_grad():
            log_q = values.pop("token_logprobs")
            trainers = values.pop("as_sampled", log_q)
            losses, sums = _losses(micro, algorithm, log_q, values)
            parts = {name: (loss * micro.weights).sum() for name, loss in losses.items()}
            total = sum(parts.values(), start=hidden.new_zeros(()))
            measured = MicroBatchMetrics({"actor/loss": total, **parts}, sums)
            if algorithm.learns_answers:
                data_mask = micro.sampler_logprobs.isnan()
                sums |= {SAMPLED: (~data_mask).to(log_q.dtype), GIVEN: data_mask.to(log_q.dtype)}
            if not algorithm.is_supervised:  # nobody sampled
                old_logprobs = trainers if micro.old_logprobs is None else micro.old_logprobs
                add_mismatch(measured, old_logprobs, micro.sampler_logprobs)
        return total if gradients is None else gradients.attach_to(total), measured

    return evaluate


Share = Callable[[Values, int], Tensor]
"""The share [] in the loss of the positions from so many on, of their values; differentiable."""


def _share(
    micro: MicroBatch, algorithm: Algorithm, rollout: Rollout, hidden: Tensor, head: HeadFn, chunk: int, roomy: bool
) -> Share:
    """Return how values of some positions count in the loss while the others' are not known yet.

    Where what a token counts depends on other tokens of its response, the tokens' log-probabilities are computed first,
    without gradients, and what each token counts follows from them.
    """
    if not algorithm.couples_tokens:
        return lambda values, start: _total(_part(micro, values, start), algorithm, values)

    def logprobs_at(logits: Tensor, start: int) -> Values:
        sampled = rollout if algorithm.needs_policy else None
        return {"token_logprobs": policy.token_logprobs(logits, start, micro, sampled)}

    values = evaluate_in_chunks(hidden, head, logprobs_at, chunk, roomy)
    zeros = torch.zeros_like(values["token_logprobs"])
    values |= {"entropy": zeros, "distill": zeros.clone(), "supervised": zeros.clone()}  # the loss is linear in these
    if not algorithm.cross_entropy_weight:
        del values["supervised"]
    with torch.enable_grad():
        leaves = {name: value.requires_grad_() for name, value in values.items() if name != "entropy"}
        gradients = torch.autograd.grad(_total(micro, algorithm, values), list(leaves.values()), allow_unused=True)
    slopes = {name: slope for name, slope in zip(leaves, gradients, strict=True) if slope is not None}

    def share(values: Values, start: int) -> Tensor:
        parts = [(values[name] * slope[start : start + len(values[name])]).sum() for name, slope in slopes.items()]
        return torch.stack(parts).sum()

    return share


def _part(micro: MicroBatch, values: Values, start: int) -> MicroBatch:
    return micro.positions(start, start + len(values["token_logprobs"]))


def _total(micro: MicroBatch, algorithm: Algorithm, values: Values) -> Tensor:
    """Compute the weighted sum of the losses of the micro-batch's tokens, differentiable in ``values``."""
    rest = dict(values)
    log_q = rest.pop("token_logprobs")
    losses, _ = _losses(micro, algorithm, log_q, rest)
    return torch.stack([(loss * micro.weights).sum() for loss in losses.values()]).sum()


def _losses(micro: MicroBatch, algorithm: Algorithm, log_q: Tensor, values: Values) -> tuple[Values, Values]:
    """Compute the losses of N tokens by name, not yet weighted, and what is worth watching; all [N].

    ``log_q``: the trainer's log-probabilities, as sampled; ``values``: what else :func:`objective` evaluates.
    """
    losses: Values = {}
    sums: Values = {"actor/entropy": values.pop("entropy")}
    supervised = values.pop("supervised", None)
    weights = importance(micro, log_q, algorithm) if algorithm.weighs_samples else None
    if weights is not None and algorithm.importance_sampling.level in ("token", "sequence"):
        sums["actor/importance_weight"] = weights.importance_weights * weights.sampled
    if algorithm.distils:
        losses["distill/loss"] = values.pop("distill")
        if weights is not None and algorithm.loss.is_policy_gradient:
            losses["distill/loss"] = losses["distill/loss"] * weights.weights(log_q)
        sums |= {f"distill/{name}": value for name, value in values.items()}
    if algorithm.policy_weight:
        assert weights is not None
        surrogate, watched = policy.policy_loss(micro, log_q, algorithm, weights)
        losses["actor/policy_loss"] = algorithm.policy_weight * surrogate
        sums |= watched
    if supervised is not None:
        data_mask = micro.sampler_logprobs.isnan()  # the data's own answers, which nobody sampled
        losses["actor/supervised_loss"] = algorithm.cross_entropy_weight * supervised * data_mask
        sums["actor/cross_entropy"] = supervised * data_mask
    if algorithm.kl.coef > 0:
        assert micro.reference_logprobs is not None, "the penalty needs the reference's log-probabilities"
        assert weights is not None
        penalty = kl_penalty(log_q, micro.reference_logprobs, algorithm.kl.estimator, weights.old)
        penalty = penalty * weights.importance_weights * weights.sampled
        losses["actor/kl_loss"] = algorithm.kl.coef * penalty
        sums["actor/kl_reference"] = penalty
    return losses, sums


def logprobs(micro: MicroBatch, config: Config, roomy: bool = False) -> Callable[[Tensor, HeadFn], Tensor]:
    """Return, in place of an objective, the response tokens' log-probabilities as they were sampled, [N]."""

    def values_at(logits: Tensor, start: int) -> Values:
        return {"logprobs": policy.token_logprobs(logits, start, micro, config.rollout)}

    chunk = config.actor.loss_chunk
    return lambda hidden, head: evaluate_in_chunks(hidden, head, values_at, chunk, roomy)["logprobs"]


def add_mismatch(measured: MicroBatchMetrics, trainer_logprobs: Tensor, sampler_logprobs: Tensor) -> None:
    """Measure how far trainer and sampler disagree on the same weights, over N tokens.

    KL(sampler || trainer) by the k3 estimate r - 1 - log r with r = trainer / sampler (Schulman, 2020); 0 for the
    data's own answers, which nobody sampled.
    """
    data_mask = sampler_logprobs.isnan()
    log_ratio = torch.where(data_mask, 0.0, trainer_logprobs - sampler_logprobs)
    ratio = log_ratio.exp()
    measured.sums["mismatch/kl"] = ratio - 1 - log_ratio
    ratio = torch.where(data_mask, 0.0, ratio)
    measured.sums["mismatch/is_ratio_mean"] = ratio
    measured.largest["mismatch/is_ratio_max"] = ratio.max() if len(ratio) else ratio.sum()
