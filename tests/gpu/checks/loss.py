"""A divergence and its gradient at 8,192 positions of a vocabulary of 128,000, beside the goals for it."""

from __future__ import annotations

import itertools
import statistics

import torch

from tests.benchmarks.loss import Shape, measure
from tests.gpu.checks.context import Context

GOAL_MS, GOAL_GB = 60.7, 4.0
"""The time of Liger's JSD on one H100, and about a third of its memory."""
SHAPE, SMALL = Shape(8192, 128_000, roomy=True), Shape(64, 512)
LOSSES = ("jsd", "reverse_kl")
WAYS = {"one pass": "_plain", "compiled": ""}
"""Ways of :func:`tests.benchmarks.loss.measure`, and how figures are named."""
ROUNDS = 3


def note_losses(context: Context) -> None:
    """Note milliseconds and peak memory of each loss, head included, and the ratios to the goals; none fails."""
    device = torch.device("cpu" if context.rehearsal else "cuda")
    shape = SMALL if context.rehearsal else SHAPE
    context.note(loss_goal_ms=GOAL_MS, loss_goal_gb=GOAL_GB)
    for loss, (way, name) in itertools.product(LOSSES, WAYS.items()):
        runs = [measure(way, loss, shape, device) for _ in range(ROUNDS)]
        ms = 1e3 * statistics.median(run["seconds"] for run in runs)
        peak = max(run["bytes"] for run in runs)
        context.note({f"{loss}{name}_ms": ms, f"{loss}{name}_peak_gib": peak / (1 << 30)})
        if not context.rehearsal:
            context.note({f"{loss}{name}_ms_of_goal": ms / GOAL_MS, f"{loss}{name}_peak_of_goal": peak / 1e9 / GOAL_GB})
