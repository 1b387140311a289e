"""Weights and optimizer state of all ranks, to and from a checkpoint, by torch's distributed checkpointing.

What was sharded over one number of ranks can be read by another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

Part = list[dict[str, NDArray[np.float32]]]
"""Of every parameter that is trained, in the optimizer's order: this rank's part of its weight and of its state."""

_WEIGHT = "weight"

# What is not trained, as the model beside an adapter, is where it was read from.
_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


def save_state(model: nn.Module, optimizer: Optimizer, directory: str) -> None:
    """Write to ``directory``. A collective."""
    state_dict_saver.save(_state(model, optimizer), checkpoint_id=directory)


def load_state(model: nn.Module, optimizer: Optimizer, directory: str) -> None:
    """Read in place what :func:`save_state` wrote. A collective. Raises what torch raises where it does not fit."""
    state = _state(model, optimizer)
    state_dict_loader.load(state, checkpoint_id=directory)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=_OPTIONS
    )


@torch.no_grad()
def part_of(optimizer: Optimizer, device: torch.device) -> Part:
    """What one rank holds, copied. No collective: for ranks that are in the middle of one that never ends."""
    # On the stream that computes, the copies would wait for the collective.
    own = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(own):
        return [
            {name: _local(t).cpu().numpy().copy() for name, t in ({_WEIGHT: p} | optimizer.state.get(p, {})).items()}
            for p in _parameters(optimizer)
        ]


@torch.no_grad()
def put_part(optimizer: Optimizer, part: Part) -> None:
    """Put back in place what :func:`part_of` copied from a rank that is sharded alike."""
    for p, kept in zip(_parameters(optimizer), part, strict=True):
        values = {name: torch.tensor(value) for name, value in kept.items()}
        _local(p).copy_(values.pop(_WEIGHT))
        for name, value in values.items():
            if value.ndim:
                optimizer.state[p][name] = torch.zeros_like(p)
                _local(optimizer.state[p][name]).copy_(value)
            else:  # the number of steps, which is of the whole parameter
                optimizer.state[p][name] = value


@torch.no_grad()
def move(model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
    """Move weights and optimizer state of one rank to ``device``. No collective."""
    model.to(device)
    for p in _parameters(optimizer):
        state = optimizer.state.get(p, {})
        state.update({name: value.to(device) for name, value in state.items() if value.ndim})


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _local(tensor: Tensor) -> Tensor:
    found: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": weights, "optimizer": moments}
