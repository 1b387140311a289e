"""Computes log-probabilities of some tokens, and of all others together, with a gradient by formula.

For logits z [n, V], ids S [n, K] and q = softmax(z / T): with u_v the slopes of a loss with respect to log q_v of v in
S, w that with respect to log q_others, U = sum_v u_v + w, and r the softmax over the others alone,

    d loss / d z_v = (u_v - U q_v) / T  in S,    r_v (w - U q_others) / T  elsewhere,

so one multiplication of [n, V] is the backward pass, and nothing is divided by what may be 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Outcomes(NamedTuple):
    """Values of softmax(z / T) at n positions; only the first two are differentiable.

    ``chosen`` [n, K]: log-probabilities of the ids; ``others`` [n]: of all else together, exact however small.
    ``entropy`` [n] is over the whole vocabulary. ``log_q`` of any token is ``z / T - highest - log_sum``, [n] each.
    """

    chosen: Tensor
    others: Tensor
    entropy: Tensor
    highest: Tensor
    log_sum: Tensor


def outcomes(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Outcomes:
    """Compare ``ids`` [n, K], distinct in each row and not the whole vocabulary, with all other tokens; logits [n, V].

    Arithmetic is in float32, or in float64 if the logits are.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return Outcomes(*_OutcomesFunction.apply(logits, ids.long(), temperature))  # type: ignore[no-untyped-call]


class _OutcomesFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, ...]:
        chosen = logits.gather(-1, ids) / temperature
        # Finite rather than -inf, for rows whose others are all impossible, and for 0 log 0.
        lowest = torch.finfo(logits.dtype).min / 4
        rest = (logits / temperature).clamp_(lowest) if temperature != 1.0 else logits.clamp(lowest)
        rest.scatter_(-1, ids, lowest)
        peak = rest.amax(-1)
        r = torch.softmax(rest.sub_(peak[:, None]), -1)
        log_size = -r.amax(-1).log()  # of the sum that r was divided by
        entropy_of_r = log_size - torch.linalg.vecdot(r, rest)
        highest = torch.maximum(peak, chosen.amax(-1)) if ids.shape[1] else peak
        log_others = peak - highest + log_size
        chosen = chosen - highest[:, None]
        log_sum = torch.logaddexp(log_others, torch.logsumexp(chosen, -1))
        chosen, others = chosen - log_sum[:, None], log_others - log_sum
        q, q_others = chosen.exp(), others.exp()
        entropy = torch.special.entr(q).sum(-1) + torch.special.entr(q_others) + q_others * entropy_of_r
        ctx.save_for_backward(r, ids, q, q_others)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy, highest, log_sum)
        return chosen, others, entropy, highest, log_sum

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, u: Tensor, w: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        r, ids, q, q_others = ctx.saved_tensors
        u, w = u / ctx.temperature, w / ctx.temperature
        total = u.sum(-1) + w
        slope = r * (w - total * q_others)[:, None]
        return slope.scatter_(-1, ids, u - total[:, None] * q), None, None
