"""Computes log-probabilities of some tokens, and of all others together, with a gradient by formula.

For logits z [n, V], ids S [n, K] and q = softmax(z / T): with u_v the slopes of a loss with respect to log q_v of v in
S, w that with respect to log q_others, U = sum_v u_v + w, and r the softmax over the others alone,

    d loss / d z_v = (u_v - U q_v) / T  in S,    r_v (w - U q_others) / T  elsewhere,

so one multiplication of [n, V] is the backward pass, and nothing is divided by what may be 0.

On a GPU that takes memory's time, not arithmetic's. :func:`use_kernels` has both passes as a kernel each, which read
the logits and write nothing as large but the gradient, in the logits' own type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gkd.modeling.compiling import compile_function


class Outcomes(NamedTuple):
    """Values of softmax(z / T) at n positions; only the first two are differentiable.

    ``logprobs`` [n, K]: log-probabilities of the ids; ``others`` [n]: of all else together, exact however small.
    ``entropy`` [n] is over the whole vocabulary. ``log_q`` of any token is ``z / T - highest - log_sum``, [n] each.
    """

    logprobs: Tensor
    others: Tensor
    entropy: Tensor
    highest: Tensor
    log_sum: Tensor


def outcomes(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Outcomes:
    """Compare ``ids`` [n, K], distinct in each row and not the whole vocabulary, with all other tokens; logits [n, V].

    Arithmetic is in float32, or in float64 if the logits are.
    """
    if (kernels := _kernels.get()) is not None:
        return Outcomes(*_FusedOutcomes.apply(logits, ids.long(), temperature, kernels))  # type: ignore[no-untyped-call]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return Outcomes(*_OutcomesFunction.apply(logits, ids.long(), temperature))  # type: ignore[no-untyped-call]


class Kernels(NamedTuple):
    """The two passes over [n, V], :func:`sum_others` and :func:`spread`, compiled."""

    sums: Callable[[Tensor, float], tuple[Tensor, Tensor, Tensor]]
    spread: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]

    @staticmethod
    def compile() -> Kernels:
        """Have both compile when they first run."""
        return Kernels(compile_function(sum_others, None), compile_function(spread, None))


_kernels: ContextVar[Kernels | None] = ContextVar("_kernels", default=None)


@contextmanager
def use_kernels(kernels: Kernels) -> Iterator[None]:
    """Have :func:`outcomes` compute by ``kernels`` meanwhile, and the backward pass of what they gave."""
    before = _kernels.set(kernels)
    try:
        yield
    finally:
        _kernels.reset(before)


def sum_others(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return, of x = ``logits`` [n, V] / T: the largest, logsumexp(x) less that, and the entropy of softmax(x); [n]."""
    x = _scale(logits, temperature)
    peak = x.amax(-1, keepdim=True)
    weights = (x - peak).exp()
    total = weights.sum(-1)
    log_size = total.log()
    return peak[:, 0], log_size, log_size - (weights * (x - peak)).sum(-1) / total


def spread(logits: Tensor, peak: Tensor, log_size: Tensor, factor: Tensor, temperature: float) -> Tensor:
    """Return ``factor`` exp(``logits`` / T - ``peak`` - ``log_size``) in the logits' type, [n, V]; of the others [n].

    Taken off one after the other: their sum would be rounded first.
    """
    slope = (_scale(logits, temperature) - peak[:, None] - log_size[:, None]).exp() * factor[:, None]
    return slope.to(logits.dtype)


def _scale(logits: Tensor, temperature: float) -> Tensor:
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return x.clamp(min=torch.finfo(x.dtype).min / 4)  # finite, as below


class _FusedOutcomes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float, kernels: Kernels) -> tuple[Tensor, ...]:
        id_logits = logits.gather(-1, ids)
        # In place and put back: autograd's count of changes stays, since afterwards there is none.
        masked = logits.data.scatter_(-1, ids, torch.finfo(logits.dtype).min / 4)
        peak, log_size, entropy_of_r = kernels.sums(masked, temperature)
        masked.scatter_(-1, ids, id_logits)
        scaled_logits = id_logits.to(peak.dtype) / temperature
        values, q, q_others = _combine(scaled_logits, peak, log_size, entropy_of_r)
        ctx.save_for_backward(logits, ids, q, q_others, peak, log_size)
        # On a GPU autograd has a thread of its own for what is backward; torch's settings are those of a context.
        ctx.temperature, ctx.kernels, ctx.context = temperature, kernels, copy_context()
        ctx.mark_non_differentiable(*values[2:])
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, u: Tensor, w: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids, q, q_others, peak, log_size = ctx.saved_tensors
        u, w = u / ctx.temperature, w / ctx.temperature
        total = u.sum(-1) + w
        factor = w - total * q_others
        slope = ctx.context.run(ctx.kernels.spread, logits, peak, log_size, factor, ctx.temperature)
        return slope.scatter_(-1, ids, (u - total[:, None] * q).to(slope.dtype)), None, None, None


class _OutcomesFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, ...]:
        scaled_logits = logits.gather(-1, ids) / temperature
        # Finite rather than -inf, for rows whose others are all impossible, and for 0 log 0.
        lowest = torch.finfo(logits.dtype).min / 4
        rest = (logits / temperature).clamp_(lowest) if temperature != 1.0 else logits.clamp(lowest)
        rest.scatter_(-1, ids, lowest)
        peak = rest.amax(-1)
        r = torch.softmax(rest.sub_(peak[:, None]), -1)
        log_size = -r.amax(-1).log()  # of the sum that r was divided by
        values, q, q_others = _combine(scaled_logits, peak, log_size, log_size - torch.linalg.vecdot(r, rest))
        ctx.save_for_backward(r, ids, q, q_others)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(*values[2:])
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, u: Tensor, w: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        r, ids, q, q_others = ctx.saved_tensors
        u, w = u / ctx.temperature, w / ctx.temperature
        total = u.sum(-1) + w
        slope = r * (w - total * q_others)[:, None]
        return slope.scatter_(-1, ids, u - total[:, None] * q), None, None


def _combine(
    scaled_logits: Tensor, peak: Tensor, log_size: Tensor, entropy_of_r: Tensor
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Return the values of :class:`Outcomes`, and the probabilities of the ids [n, K] and of all others [n].

    ``scaled_logits`` [n, K]: x = z / T of the ids; of all others ``peak``, ``log_size`` and ``entropy_of_r`` as
    :func:`sum_others` has them.
    """
    highest = torch.maximum(peak, scaled_logits.amax(-1)) if scaled_logits.shape[1] else peak
    log_others = peak - highest + log_size
    scaled_logits = scaled_logits - highest[:, None]
    log_sum = torch.logaddexp(log_others, torch.logsumexp(scaled_logits, -1))
    logprobs, others = scaled_logits - log_sum[:, None], log_others - log_sum
    q, q_others = logprobs.exp(), others.exp()
    entropy = torch.special.entr(q).sum(-1) + torch.special.entr(q_others) + q_others * entropy_of_r
    return (logprobs, others, entropy, highest, log_sum), q, q_others
