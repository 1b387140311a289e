"""AdamW's moments in the host's memory: the same step, and what the host's link makes of it."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from gkd.actor.optimizer import SLICE, SLICES, HostAdamW
from tests.gpu.checks.context import Context, require

STEPS = 4
LENGTHS = (4 * SLICE + 5, 1000, SLICE)  # the first in more slices than are on their way at a time


def against_adamw(context: Context) -> None:
    """Some steps of both on equal gradients: weights are equal to the last bit, moments as well."""
    on = torch.device("cpu" if context.rehearsal else "cuda")
    require(LENGTHS[0] > SLICES * SLICE, "no slice waits for another")
    generator = torch.Generator(on).manual_seed(0)
    lengths = [length % SLICE or 64 for length in LENGTHS] if context.rehearsal else LENGTHS
    ours, theirs = ([torch.nn.Parameter(torch.ones(n, device=on)) for n in lengths] for _ in range(2))
    settings = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}
    host, device = HostAdamW([{"params": ours}], **settings), torch.optim.AdamW(theirs, **settings)
    seconds = {HostAdamW: [0.0] * STEPS, torch.optim.AdamW: [0.0] * STEPS}
    for step in range(STEPS):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, device=on, generator=generator)
            b.grad = a.grad.clone()
        for optimizer in (host, device):
            _wait(on)
            started = time.monotonic()
            optimizer.step()
            _wait(on)
            seconds[type(optimizer)][step] = time.monotonic() - started
    for a, b in zip(ours, theirs, strict=True):
        require(torch.equal(a, b), f"weights differ by up to {_most(a, b)}")
        for name in ("exp_avg", "exp_avg_sq"):
            mine, other = host.state[a][name], device.state[b][name].cpu()
            require(mine.device.type == "cpu", f"{name} is on {mine.device}")
            require(torch.equal(mine, other), f"{name} differs by up to {_most(mine, other)}")
    took, n_bytes = statistics.median(seconds[HostAdamW][1:]), 2 * 4 * sum(lengths)
    context.note(step_s=took, device_step_s=statistics.median(seconds[torch.optim.AdamW][1:]))
    context.note(each_way_gb_s=n_bytes / took / 1e9)


def _most(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
