"""Computes the configured loss at every response position, with what is worth watching next to it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from gkd.config import Loss
from gkd.losses.divergence import Divergence, kl, sampled_log_ratio, student_tail
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
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = logits if loss.temperature == 1.0 else logits / loss.temperature
    log_q = torch.log_softmax(scaled, -1)
    # The loss comes first and the rest keeps no graph: a checkpoint's recomputation then stops before the rest.
    aligned = None if loss.compares_tokens_alone else _align(log_q, targets, loss.tail)
    value = divergence(*(_of_tokens(log_q, targets) if aligned is None else aligned))
    if value.shape != targets.token_ids.shape:
        raise ValueError(f"algorithm.loss.name={loss.name} gives {tuple(value.shape)}: expected [{len(targets)}]")
    with torch.no_grad():
        token_log_p, token_log_q = _of_tokens(log_q, targets)
        forward = teacher_mass = student_mass = None
        reverse = sampled_log_ratio(token_log_p, token_log_q)
        if targets.k > 0:
            log_p, log_b = aligned if aligned is not None and loss.tail else _align(log_q, targets, tail=True)
            forward, reverse = kl(log_p, log_b), kl(log_b, log_p)
            teacher_mass, student_mass = (x[:, : targets.k].exp().sum(-1) for x in (log_p, log_b))
        entropy = torch.special.entr(log_q.exp()).sum(-1)
        if loss.temperature != 1.0:
            token_log_q = _pick(logits, targets.token_ids) - torch.logsumexp(logits, -1)
    return PositionLosses(value, forward, reverse, teacher_mass, student_mass, entropy, token_log_q)


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


def _align(log_q: Tensor, targets: PositionTargets, tail: bool) -> tuple[Tensor, Tensor]:
    """Return teacher's and student's log-probabilities of the same outcomes: [N, V], [N, K + 1] (tail) or [N, K]."""
    ids, log_p = targets.ids.long(), targets.logprobs.to(log_q.dtype)
    if targets.k == log_q.shape[1]:
        # There is no tail. The teacher is put in the student's order, as the teacher needs no gradient.
        return torch.full_like(log_p, -torch.inf).scatter(-1, ids, log_p), log_q
    top_q = log_q.gather(-1, ids)
    if not tail:
        return log_p, top_q
    assert targets.tail_logprobs is not None, "see _check_shapes"
    return (
        torch.cat([log_p, targets.tail_logprobs.to(log_q.dtype).unsqueeze(-1)], -1),
        torch.cat([top_q, student_tail(log_q, ids).unsqueeze(-1)], -1),
    )


def _of_tokens(log_q: Tensor, targets: PositionTargets) -> tuple[Tensor, Tensor]:
    """Return teacher's and student's log-probabilities of the response tokens, [N] each."""
    return targets.teacher_token_logprobs.to(log_q.dtype), _pick(log_q, targets.token_ids)


def _pick(rows: Tensor, ids: Tensor) -> Tensor:
    return rows.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)
