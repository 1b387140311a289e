"""On-policy distillation: bring the student to the teacher on the student's own samples.

This is GKD (Agarwal et al., arXiv 2306.13649) with all data sampled from the student: at every response position the
divergence of ``algorithm.loss`` between teacher and student, over as much of the vocabulary as the teacher sent.
"""

from __future__ import annotations

from torch import Tensor

from gkd.config import Loss
from gkd.losses.chunked import Values
from gkd.losses.micro_batch import MicroBatch
from gkd.losses.position import position_losses


def values_at(logits: Tensor, start: int, micro: MicroBatch, loss: Loss) -> Values:
    """The loss ("distill") and its diagnostics at the positions from ``start`` on; logits [n, V], values [n]."""
    assert micro.targets is not None, "distillation needs the teacher's targets"
    targets = micro.targets.rows(start, start + len(logits))
    found = position_losses(logits, targets, loss)
    # The loss first: the last tensor a chunk keeps for its backward pass is then in it, and the rest is computed once.
    return {"distill": found.loss, **found.diagnostics()}
