"""What chunks of a batch add up to, and what makes their sums those of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gkd.algorithms.aggregation import Totals


@dataclass(frozen=True, slots=True)
class MetricSums:
    """One rank's part of the metrics of some samples, by name: scalars on its device.

    ``losses`` are weighted as the gradient is, ``sums`` are over tokens; both add up. Of ``largest`` the larger stays.
    """

    losses: Mapping[str, Tensor]
    sums: Mapping[str, Tensor]
    largest: Mapping[str, Tensor]

    def __add__(self, other: MetricSums) -> MetricSums:
        """Return what both have together. All micro-batches of a step have the same names."""
        return MetricSums(
            {name: value + other.losses[name] for name, value in self.losses.items()},
            {name: value + other.sums[name] for name, value in self.sums.items()},
            {name: torch.maximum(value, other.largest[name]) for name, value in self.largest.items()},
        )

    def scale(self, totals: Totals) -> MetricSums:
        """Return these as parts of the whole batch's means."""
        return MetricSums(
            {name: value * totals.scale for name, value in self.losses.items()},
            {name: value / totals.n_positions for name, value in self.sums.items()},
            self.largest,
        )


def describe_not_finite(step: int, grad_norm: float, metrics: Mapping[str, float], n_updates: int) -> str:
    """Describe a gradient that is not finite: what of its batch's ``metrics`` is not either, and what was learned.

    ``n_updates``: of the step's mini-batches before.
    """
    others = [name for name, value in metrics.items() if not math.isfinite(value)]
    cause = f"nor are {', '.join(others)}" if others else "though every loss is"
    done = f"{n_updates} of its mini-batches were learned from before" if n_updates else "nothing was updated"
    return f"the gradient of step {step} is not finite (norm {grad_norm}), {cause}; {done}"
