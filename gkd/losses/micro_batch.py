"""Samples laid end to end: one micro-batch, without padding.

Shapes: S sequences, T tokens in all, N sampled positions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from gkd.losses.targets import PositionTargets, send
from gkd.modeling.sequences import PackedSequences


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """S sequences laid end to end.

    - sequences: their T tokens.
    - rows [N]: index of the token whose hidden state predicts each sampled token (the token before it).
    - bounds [S + 1]: where each sequence's rows start.
    - response_ids, weights, advantages, sampler_logprobs [N]: of each sampled token; weights are those in the loss.
    - old_logprobs [N]: by the weights before the batch's first update, None where that is this one.
    - reference_logprobs [N]: None without a reference.
    - targets: the teacher's, of N positions, None without one.

    S = 0 is allowed: a rank that has nothing left takes part in the others' passes with one token and no sampled
    position.
    """

    sequences: PackedSequences
    rows: Tensor
    bounds: Tensor
    response_ids: Tensor
    weights: Tensor
    advantages: Tensor
    sampler_logprobs: Tensor
    old_logprobs: Tensor | None
    reference_logprobs: Tensor | None
    targets: PositionTargets | None

    def positions(self, start: int, stop: int) -> MicroBatch:
        """Return the same with the sampled tokens from ``start`` to ``stop`` alone; ``bounds`` and ``rows`` stay."""
        names = ("response_ids", "weights", "advantages", "sampler_logprobs", "old_logprobs", "reference_logprobs")
        values = {name: getattr(self, name) for name in names}
        parts: dict[str, Any] = {name: None if all_ is None else all_[start:stop] for name, all_ in values.items()}
        targets = None if self.targets is None else self.targets.rows(start, stop)
        return replace(self, targets=targets, **parts)

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same on a device, see :func:`gkd.losses.targets.send`."""

        def move(value: Any) -> Any:
            if isinstance(value, PositionTargets):
                return value.to(device)
            if isinstance(value, PackedSequences):
                return value.to(lambda tensor: send(tensor, device))
            return send(value, device) if isinstance(value, Tensor) else value

        return MicroBatch(**{field.name: move(getattr(self, field.name)) for field in fields(self)})
