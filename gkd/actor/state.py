"""Weights and optimizer state of all ranks, to and from a checkpoint, by torch's distributed checkpointing.

What was sharded over one number of ranks can be read by another.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

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


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": weights, "optimizer": moments}
