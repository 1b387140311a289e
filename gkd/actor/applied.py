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


def mean(rows: Sequence[Metrics]) -> Metrics:
    """Mean of the metrics of a step's mini-batches; empty without any."""
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[-1]} if rows else {}
