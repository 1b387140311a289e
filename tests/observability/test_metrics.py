"""Figures of a step that several workers measure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gkd.observability.metrics import memory_metrics


def report(group: str, rank: int, **memory: float) -> Any:
    return SimpleNamespace(worker=SimpleNamespace(group=group, rank=rank), contents={"memory": memory})


def test_memory_is_that_of_the_worker_which_has_most_of_it() -> None:
    """Figure by figure; one that a worker could not measure is that of the others."""
    reports = [
        report("actor", 0, peak_gb=3.0, ooms=0.0), report("rollout", 0, peak_gb=9.0),
        report("actor", 1, peak_gb=4.0, ooms=1.0), report("actor", 2, peak_gb=2.0),
    ]  # fmt: skip
    for order in (reports, reports[::-1]):
        figures = {"memory/actor/ooms": 1.0, "memory/actor/peak_gb": 4.0, "memory/rollout/peak_gb": 9.0}
        assert memory_metrics(order) == figures
