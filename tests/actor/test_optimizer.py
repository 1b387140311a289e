"""AdamW as a run has it, against torch's loop over parameters and in float64."""

from __future__ import annotations

import copy

import pytest
import torch

from gkd.actor.optimizer import adamw
from gkd.config import Actor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fused_step_has_the_trajectory_of_the_loop(dtype: torch.dtype) -> None:
    """Over 30 steps, within the rounding of the type; matrices alone are decayed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.LayerNorm(17), torch.nn.Linear(17, 5)).to(dtype)
    plain, settings = copy.deepcopy(model), Actor(lr=1e-2, weight_decay=0.3)
    fused = adamw(model, settings)
    assert all(group["fused"] for group in fused.param_groups)
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in plain.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    loop = torch.optim.AdamW(groups, lr=1e-2, betas=settings.betas, foreach=False, fused=False)
    for step in range(30):
        rows = torch.randn(8, 33, dtype=dtype, generator=torch.Generator().manual_seed(step))
        for one, optimizer in ((model, fused), (plain, loop)):
            optimizer.zero_grad()
            one(rows).square().sum().backward()
            optimizer.step()
    for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-6)
