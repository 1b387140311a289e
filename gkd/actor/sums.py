"""What chunks of a batch add up to, and what makes their sums those of the whole batch."""

from __future__ import annotations

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
