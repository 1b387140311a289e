"""Computes the configured loss at every response position, with what is worth watching next to it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from gkd.config import Loss
from gkd.losses.chunked import require_values
from gkd.losses.divergence import Divergence, kl, sampled_log_ratio
from gkd.losses.outcomes import outcomes
from gkd.losses.targets import PositionTargets


@dataclass(frozen=True, slots=True)
class PositionLosses:
    """Values at N positions, each [N]; ``loss`` is differentiable, everything else is detached.

    ``forward_kl`` and ``reverse_kl`` are over the teacher's K tokens and one bucket for all others, whichever loss is
    trained on: lower bounds of the divergences over the full vocabulary, and those themselves where K is all of it.
    ``teacher_mass`` and ``student_mass`` are the probability of the teacher's K tokens. ``entropy`` is the student's
    over its full vocabulary. All of these are at the loss's temperature; ``token_logprobs``, the student's
    log-probabilities of the response tokens, are at temperature 1.

    Where the teacher scored only the tokens (K = 0), ``reverse_kl`` is the estimate log q(y) - log p(y) from the token
    sampled, and what cannot be known is None.
    """

    loss: Tensor
    forward_kl: Tensor | None
    reverse_kl: Tensor
    teacher_mass: Tensor | None
    student_mass: Tensor | None
    entropy: Tensor
    token_logprobs: Tensor

    def diagnostics(self) -> dict[str, Tensor]:
        """Return everything but the loss by name, without what could not be measured."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "loss"}
        return {name: value for name, value in values.items() if value is not None}


def position_losses(logits: Tensor, targets: PositionTargets, loss: Loss) -> PositionLosses:
    """Compute loss and diagnostics of the student's ``logits`` [N, V] against the teacher's targets at N positions.

    The student's logits are divided by ``loss.temperature`` here (no T^2 factor follows); the teacher's
    log-probabilities must be at that temperature already. Arithmetic is in float32, or in float64 if the logits are.
    How much of the vocabulary is compared is what the targets hold, not ``loss.top_k``:

    - K = V: the full vocabulary, whatever ``loss.tail``.
    - K < V and ``loss.tail``: the K tokens and one bucket with the rest of both distributions. By the data-processing
      inequality at least 0 and at most the divergence over the full vocabulary.
    - K < V, no tail: the partial sum over the K tokens of probabilities that are not renormalised. Not a divergence:
      it can be negative, and it need not be smallest where student and teacher agree.
    - K = 0: only losses that look at the response tokens alone (``teacher_logprobs`` "token"), whatever K.

    Raises ValueError for shapes that do not fit. Values are not checked here: see ``check_targets``.
    """
    divergence: Divergence = loss.build()
    _check_shapes(logits, targets, loss)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    token_log_p = targets.teacher_token_logprobs.to(dtype)
    if loss.compares_tokens_alone:
        of_tokens = outcomes(logits, targets.token_ids[:, None], loss.temperature)
        value = divergence(token_log_p, of_tokens.logprobs[:, 0])
        with torch.no_grad():
            comparison = _compare(logits, targets, loss.temperature)
    else:
        comparison = _compare(logits, targets, loss.temperature)
        value = divergence(*comparison.select_logprobs(loss.tail))
    require_values(value, len(targets), logits, f"algorithm.loss.name={loss.name}")
    with torch.no_grad():
        token_logits = logits.gather(-1, targets.token_ids.long()[:, None])[:, 0].to(dtype)
        token_log_q = token_logits / loss.temperature - comparison.highest - comparison.log_sum
        forward = teacher_mass = student_mass = None
        reverse = sampled_log_ratio(token_log_p, token_log_q)
        if targets.k > 0:
            log_p, log_b = comparison.select_logprobs(tail=True)
            forward, reverse = kl(log_p, log_b), kl(log_b, log_p)
            teacher_mass, student_mass = (x[:, : targets.k].exp().sum(-1) for x in (log_p, log_b))
        if loss.temperature != 1.0:
            token_log_q = token_logits - torch.logsumexp(logits.to(dtype), -1)
    return PositionLosses(value, forward, reverse, teacher_mass, student_mass, comparison.entropy, token_log_q)


@dataclass(frozen=True, slots=True)
class _PairedLogprobs:
    """Log-probabilities of teacher and student over the same outcomes, and what else is known of the student.

    ``log_p``, ``log_q``: [N, V], or [N, K] with those of all other tokens together in ``tails``, [N] each. ``entropy``,
    ``highest`` and ``log_sum`` as of :class:`gkd.losses.outcomes.Outcomes`.
    """

    log_p: Tensor
    log_q: Tensor
    tails: tuple[Tensor, Tensor] | None
    entropy: Tensor
    highest: Tensor
    log_sum: Tensor

    def select_logprobs(self, tail: bool) -> tuple[Tensor, Tensor]:
        """Return teacher's and student's log-probabilities: [N, V], [N, K + 1] (tail) or [N, K]."""
        if self.tails is None or not tail:
            return self.log_p, self.log_q
        log_p, log_q = (
            torch.cat([x, rest[:, None]], -1) for x, rest in zip((self.log_p, self.log_q), self.tails, strict=True)
        )
        return log_p, log_q


def _compare(logits: Tensor, targets: PositionTargets, temperature: float) -> _PairedLogprobs:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    ids, log_p = targets.ids.long(), targets.logprobs.to(dtype)
    if targets.k < logits.shape[1]:
        log_q, others, *rest = outcomes(logits, ids, temperature)
        if targets.tail_logprobs is None:  # of no tokens at all
            return _PairedLogprobs(log_p, log_q, None, *rest)
        return _PairedLogprobs(log_p, log_q, (targets.tail_logprobs.to(dtype), others), *rest)
    # There is no tail. The teacher is put in the student's order, as the teacher needs no gradient.
    scaled = logits.to(dtype) if temperature == 1.0 else logits.to(dtype) / temperature
    log_q = torch.log_softmax(scaled, -1)
    log_p = torch.full_like(log_p, -torch.inf).scatter(-1, ids, log_p)
    with torch.no_grad():
        highest = scaled.amax(-1)
        log_q_highest = log_q.amax(-1)
        entropy = torch.special.entr(log_q.exp()).sum(-1)
    return _PairedLogprobs(log_p, log_q, None, entropy, highest, -log_q_highest)


def _check_shapes(logits: Tensor, targets: PositionTargets, loss: Loss) -> None:
    if logits.ndim != 2 or len(logits) != len(targets):
        raise ValueError(f"logits {tuple(logits.shape)} for targets of {len(targets)} positions: expected [N, V]")
    if targets.k > logits.shape[1]:
        raise ValueError(f"the teacher gave {targets.k} tokens a position, the student has {logits.shape[1]} logits")
    if 0 < targets.k < logits.shape[1] and targets.tail_logprobs is None:
        raise ValueError(f"the teacher's top {targets.k} of {logits.shape[1]} tokens come without their tail")
    if targets.k == 0 and len(targets) > 0 and not loss.compares_tokens_alone:
        raise ValueError(
            f"{loss.name} needs the teacher's most likely tokens, and the targets hold none (K = 0): "
            "ask the teacher for them, or use a loss of the response tokens alone"
        )
