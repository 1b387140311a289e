"""AdamW and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

from gkd.config import Actor

FUSED_ON = ("cpu", "cuda")
FLOOR = 0.1  # share of the peak at which linear and cosine decay end


def learning_rate(settings: Actor, step: int, total_steps: int) -> float:
    """Return the rate of optimizer step ``step`` (from 0): a linear rise over warmup_steps, then the chosen decay."""
    assert settings.lr is not None, "a whole configuration has decided it"
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.lr_decay == "constant":
        return settings.lr
    done = (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps)
    left = 1 - done if settings.lr_decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.lr * (FLOOR + (1 - FLOOR) * left)


def adamw(model: nn.Module, settings: Actor) -> torch.optim.AdamW:
    """Make AdamW, with its parameters' names; norms, biases and other vectors are not decayed.

    Where torch has it for the parameters' device, a step is one fused kernel: without it there is a loop over them on a
    CPU, and temporaries of the parameters' size on a GPU.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [(name, p) for name, p in trained if p.ndim > 1]
    vectors = [(name, p) for name, p in trained if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    beta1, beta2 = settings.betas
    groups = [group for group in groups if group["params"]]  # an adapter has no vectors
    fused = all(p.device.type in FUSED_ON and p.is_floating_point() for _, p in trained)
    return torch.optim.AdamW(groups, lr=learning_rate(settings, 0, 1), betas=(beta1, beta2), fused=fused)


def n_updates(optimizer: torch.optim.Optimizer) -> int:
    """Return the steps that it has done, those before a checkpoint included."""
    state: dict[str, torch.Tensor] = next(iter(optimizer.state.values()), {})
    return int(state.get("step", 0))
