"""The loss of many positions without the logits of all of them at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gkd.config import Loss
from gkd.losses.position import PositionLosses, position_losses
from gkd.losses.targets import PositionTargets


def chunked_loss(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: PositionTargets,
    loss: Loss,
    chunk: int,
    weights: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted sum of the loss over N positions (a differentiable scalar), and every diagnostic, detached, [N].

    ``head`` turns hidden states [n, D] into logits [n, V]; ``hidden`` is [N, D], ``weights`` [N]. The head sees at most
    ``chunk`` positions at a time, once in the forward and once more in the backward pass, and no logits outlive their
    chunk. ``targets`` may stay on another device than ``hidden``: each chunk brings its own over.

    With N = 0 the head is called once with no rows: the sum is 0, and the backward pass gives the head's parameters
    and ``hidden`` gradients of 0 rather than none, as the other ranks of a collective expect.

    Under FSDP2 the head's parameters belong to the group of the module whose forward calls this. A head that is a group
    of its own would be gathered and reduced once a call, and ranks with different numbers of chunks would deadlock.

    Raises ValueError where the lengths differ or ``chunk`` is not positive.
    """
    n = len(hidden)
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; at least one position at a time is needed")
    if len(targets) != n or weights.shape != (n,):
        raise ValueError(
            f"hidden has {n} positions, targets {len(targets)}, weights {tuple(weights.shape)}: they must agree"
        )

    def losses_of(rows: Tensor, start: int) -> PositionLosses:
        return position_losses(head(rows), targets.rows(start, start + len(rows)).to(rows.device), loss)

    # split, not slices: the backward of each slice would write zeros for all N rows.
    parts: list[PositionLosses] = [
        checkpoint(losses_of, rows, start, use_reentrant=False)
        for start, rows in zip(range(0, max(n, 1), chunk), torch.split(hidden, chunk), strict=True)
    ]
    # Weighted out here, so that the last tensor a chunk keeps for its backward is in its loss, not after its metrics.
    weights = weights.to(device=hidden.device, dtype=parts[0].loss.dtype)
    total = (torch.cat([part.loss for part in parts]) * weights).sum()
    diagnostics = [part.diagnostics() for part in parts]
    return total, {name: torch.cat([part[name] for part in diagnostics]) for name in diagnostics[0]}
