"""AdamW as a run has it, against torch's loop over parameters and in float64."""

from __future__ import annotations

import copy

import pytest
import torch

from gkd.actor import optimizer as own
from gkd.actor.optimizer import HostAdamW, adamw
from gkd.actor.state import move, part_of, put_part
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


@pytest.mark.parametrize("size", [1 << 24, 64, 7])
def test_moments_in_the_hosts_memory_change_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit but for where slices cut what a CPU computes at once; also handed on, and after a move."""
    monkeypatch.setattr(own, "SLICE", size)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.LayerNorm(17), torch.nn.Linear(17, 5))
    plain, settings, cpu = copy.deepcopy(model), Actor(lr=1e-2, weight_decay=0.3), torch.device("cpu")
    model[2].bias.requires_grad_(False)
    plain[2].bias.requires_grad_(False)
    expected = adamw(plain, settings)

    def make() -> HostAdamW:
        names = {name for group in expected.param_groups for name in group["param_names"]}
        params = [(name, p) for name, p in model.named_parameters() if name in names]
        groups = [{"params": [(name, p) for name, p in params if (p.ndim > 1) == (decay > 0)], "weight_decay": decay}
                  for decay in (0.3, 0.0)]  # fmt: skip
        return HostAdamW(groups, lr=1e-2, betas=settings.betas, fused=True)

    optimizer = make()
    assert not isinstance(expected, HostAdamW)  # the parameters are on the host themselves
    for step in range(6):
        if step == 3:
            kept, optimizer = part_of(optimizer, cpu, None), make()
            put_part(optimizer, kept)
            moments = [state["exp_avg"] for state in optimizer.state.values()]
            move(model, optimizer, cpu)
            assert all(a is b["exp_avg"] for a, b in zip(moments, optimizer.state.values(), strict=True))
        rows = torch.randn(8, 33, generator=torch.Generator().manual_seed(step))
        for one, its in ((model, optimizer), (plain, expected)):
            its.zero_grad()
            one(rows).square().sum().backward()
            its.step()
    assert own.n_updates(optimizer) == own.n_updates(expected) == 6
    for p, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, other, rtol=0.0 if size > 1000 else 1e-6, atol=0.0 if size > 1000 else 1e-7)


def test_moments_are_on_the_host_where_weights_are_elsewhere() -> None:
    """Of another device and with offload_optimizer alone; there is nothing to move where weights are on the host."""
    settings = Actor(lr=1e-2, offload_optimizer=True)
    optimizer = adamw(torch.nn.Linear(3, 2, device="meta"), settings)
    assert isinstance(optimizer, HostAdamW)
    assert {state[name].device.type for state in optimizer.state.values() for name in own.MOMENTS} == {"cpu"}
    assert not isinstance(adamw(torch.nn.Linear(3, 2, device="meta"), Actor(lr=1e-2)), HostAdamW)
    assert not isinstance(adamw(torch.nn.Linear(3, 2), settings), HostAdamW)
