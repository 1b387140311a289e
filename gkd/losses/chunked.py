"""Evaluates a loss at many positions without the logits of all of them at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Values = dict[str, Tensor]


def chunked(
    hidden: Tensor, head: Callable[[Tensor], Tensor], of: Callable[[Tensor, int], Values], chunk: int
) -> Values:
    """Evaluate ``of`` at N positions, ``chunk`` of them at a time; every value is [N].

    ``head`` turns hidden states [n, D] into logits [n, V]; ``hidden`` is [N, D]. ``of(logits, start)`` gives named
    values [n] of the positions from ``start`` on, differentiable or not. The head sees at most ``chunk`` positions at a
    time, once in the forward and once more in the backward pass, and no logits outlive their chunk.

    With N = 0 the head is called once with no rows, and the backward pass gives the head's parameters and ``hidden``
    gradients of 0 rather than none, as the other ranks of a collective expect.

    Under FSDP2 the head's parameters belong to the group of the module whose forward calls this. A head that is a group
    of its own would be gathered and reduced once a call, and ranks with different numbers of chunks would deadlock.

    Raises ValueError where ``chunk`` is not positive.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; at least one position at a time is needed")

    def evaluate(rows: Tensor, start: int) -> Values:
        return of(head(rows), start)

    # split, not slices: the backward of each slice would write zeros for all N rows.
    starts = range(0, max(len(hidden), 1), chunk)
    parts: list[Values] = [
        checkpoint(evaluate, rows, start, use_reentrant=False)
        for start, rows in zip(starts, torch.split(hidden, chunk), strict=True)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
