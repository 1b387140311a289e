"""Evaluates a loss at many positions, and its gradient in the same pass, without the logits of all of them at once.

A chunk of positions goes through the head together, for the sake of its matrix products. What is worked out from the
logits is worked out a block of rows at a time, small enough for a processor's cache, and the gradient of a block takes
the place of its logits. N positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gkd.losses.divergence import Divergence
from gkd.losses.head_gradients import head_pass

Values = dict[str, Tensor]
HeadFn = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of a loss with respect to the hidden states and the head's parameters, ready before its backward pass.

    ``slopes`` are in the order of ``inputs``. They are given to autograd once, and are gone then.
    """

    inputs: tuple[Tensor, ...]
    slopes: list[Tensor]

    def attach_to(self, loss: Tensor) -> Tensor:
        """Return the scalar ``loss`` as one whose backward pass gives the inputs these gradients."""
        if not self.inputs:
            return loss
        carried: Tensor = _PrecomputedGradients.apply(loss, self.slopes, *self.inputs)  # type: ignore[no-untyped-call]
        return carried


class _PrecomputedGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, slopes: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.slopes = slopes
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.slopes:
            raise RuntimeError("the gradients of a chunked loss are there for one backward pass")
        # In place: a second copy of the head's gradient can be most of the memory that is left.
        slopes = [saved.mul_(slope) for saved in ctx.slopes]
        ctx.slopes.clear()
        return (None, None, *slopes)


@torch.no_grad()
def evaluate_in_chunks(
    hidden: Tensor, head: HeadFn, of: Callable[[Tensor, int], Values], chunk: int, roomy: bool = False
) -> Values:
    """Evaluate ``of`` at N positions without gradients, ``chunk`` of them at a time; every value is [N].

    ``head`` turns hidden states [n, D] into logits [n, V]; ``hidden`` is [N, D]. ``of(logits, start)`` gives named
    values [n] of the positions from ``start`` on. With N = 0 the head is called once with no rows. ``roomy``: see
    :meth:`gkd.losses.divergence.Divergence.block_rows`.

    Raises ValueError where ``chunk`` is not positive.
    """
    collected: Values = {}
    for start, rows in _chunks(hidden, chunk):
        for first, block in _blocks(head(rows), start, roomy):
            _keep(collected, of(block, first), first, len(hidden))
    return collected


@torch.no_grad()
def differentiate_in_chunks(
    hidden: Tensor,
    head: HeadFn,
    of: Callable[[Tensor, int], tuple[Tensor, Values]],
    chunk: int,
    roomy: bool = False,
) -> tuple[Values, Gradients]:
    """Evaluate a loss at N positions, and its gradient, ``chunk`` positions at a time.

    ``of(logits, start)`` gives the share [] that the positions from ``start`` on have in the loss, differentiable in
    ``logits`` [n, V], and named values [n]. The loss is the sum of the shares. Returns the values of all positions,
    detached, and the gradient of the loss, which :meth:`Gradients.attach_to` hands to autograd. The head runs once;
    of a plain ``nn.Linear`` there is one copy of the weight's gradient, and logits are overwritten by theirs.

    With N = 0 the head is called once with no rows, and the gradients of its parameters and of ``hidden`` are 0 rather
    than none, as the other ranks of a collective expect.

    Under FSDP2 the head's parameters belong to the group of the module whose forward calls this. A head that is a group
    of its own would be gathered and reduced once a call, and ranks with different numbers of chunks would deadlock.
    """
    source, through = hidden.detach(), head_pass(head)
    slope, collected = torch.empty_like(source), Values()
    for start, rows in _chunks(source, chunk):

        def differentiate(logits: Tensor, into: Tensor, start: int = start) -> None:
            blocks, places = (_blocks(values, start, roomy) for values in (logits, into))
            for (first, block), (_, place) in zip(blocks, places, strict=True):
                with torch.enable_grad():
                    leaf = block.detach().requires_grad_()
                    share, values = of(leaf, first)
                place.copy_(torch.autograd.grad(share, leaf)[0])
                _keep(collected, values, first, len(source))

        slope[start : start + len(rows)] = through(rows, differentiate)
    slopes: dict[Tensor, Tensor] = {hidden: slope} if hidden.requires_grad else {}
    slopes |= through.slopes
    return collected, Gradients(tuple(slopes), list(slopes.values()))


def _chunks(hidden: Tensor, chunk: int) -> Iterator[tuple[int, Tensor]]:
    starts = range(0, max(len(hidden), 1), chunk)
    return zip(starts, torch.split(hidden, chunk), strict=True)


def _blocks(logits: Tensor, start: int, roomy: bool) -> Iterator[tuple[int, Tensor]]:
    rows = Divergence.block_rows(logits.shape[-1], logits.device.type == "cpu", roomy)
    starts = range(start, start + max(len(logits), 1), rows)
    return zip(starts, torch.split(logits, rows), strict=True)


def _keep(collected: Values, values: Values, start: int, n: int) -> None:
    """Copy the values of some positions into those of all ``n``.

    Small tensors that outlive their block would each take a place in the heap that the next block then does not fit in.
    """
    for name, value in values.items():
        if name not in collected:
            collected[name] = value.detach().new_empty(n)
        collected[name][start : start + len(value)] = value.detach()


def require_values(values: Any, n: int, source: Tensor, setting: str) -> None:
    """Raise ValueError unless what a class gives is of each of ``n`` positions, and differentiable where ``source`` is.

    ``setting``: what names the class, which may be a user's own.
    """
    if not isinstance(values, Tensor) or values.shape != (n,):
        description = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{setting} gives {description}: expected [{n}]")
    if torch.is_grad_enabled() and source.requires_grad and not values.requires_grad:
        raise ValueError(f"{setting} gives values without a gradient: the student's log-probabilities are detached")
