"""Which step's update the actor's weights hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Applied:
    """Weights and optimizer state are those after all updates of ``step``, whose mini-batches' metrics are ``rows``."""

    step: int
    rows: tuple[Metrics, ...] = ()


def over_mini_batches(rows: Sequence[Metrics]) -> Metrics:
    """Combine the metrics of a step's mini-batches, none without any: means, of names that end in ``max`` the largest.

    A mean of what each mini-batch had at most would hide the one token that the metric is for.
    """

    def combined(name: str) -> float:
        values = [row[name] for row in rows]
        return max(values) if name.endswith("max") else sum(values) / len(values)

    return {name: combined(name) for name in rows[-1]} if rows else {}
