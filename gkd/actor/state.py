"""Weights and optimizer state of all ranks, to and from other processes and checkpoints.

A checkpoint has one safetensors file a rank, with the rows of every trained parameter, and of its moments, that the
rank holds. What was sharded over one number of ranks can be read by another. Nothing here is a collective.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from gkd.actor.optimizer import HostAdamW, parameters_of, take_local
from gkd.durable import Checksum, apply_umask, compute_checksum, flush, reason
from gkd.errors import RunFailed

Part = list[dict[str, NDArray[np.float32]]]
"""Of every parameter that is trained, in the optimizer's order: this rank's part of its weight and of its state."""

_WEIGHT = "weight"
_SHARDS = "shards"


@torch.no_grad()
def part_of(optimizer: Optimizer, device: torch.device, updated: torch.cuda.Event | None) -> Part:
    """Return what one rank holds, copied. No collective: for ranks that are in the middle of one that never ends.

    ``updated`` is recorded after the last optimizer step.
    """
    # On the stream that computes, the copies would wait for the collective.
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    if stream is not None and updated is not None:
        stream.wait_event(updated)
    with torch.cuda.stream(stream):
        return [
            {
                name: take_local(t).cpu().numpy().copy()
                for name, t in ({_WEIGHT: p} | optimizer.state.get(p, {})).items()
            }
            for p in parameters_of(optimizer)
        ]


def make_empty_part(optimizer: Optimizer) -> Part:
    """Return nothing of every parameter, of a rank whose part another one writes."""
    return [{} for _ in parameters_of(optimizer)]


@torch.no_grad()
def put_part(optimizer: Optimizer, part: Part) -> None:
    """Put back in place what :func:`part_of` copied from a rank that is sharded alike."""
    for p, state in zip(parameters_of(optimizer), part, strict=True):
        _put(p, {name: torch.tensor(value) for name, value in state.items()}, optimizer.state[p])


def write_part(optimizer: Optimizer, part: Part, file: Path) -> Checksum:
    """Write a rank's part to ``file``, and flush it to the disk. Raises RunFailed, in one line, when that fails.

    Names are the optimizer's: in the middle of a pass, FSDP has whole parameters in the model's place of shards.
    """
    arrays, shards = {}, {}
    for (name, p), state in zip(_named_parameters(optimizer), part, strict=True):
        shards[name] = {"shape": list(p.shape), "start": _start(p)}
        arrays.update({f"{kind}.{name}": value for kind, value in state.items()})
    try:
        save_file(arrays, file, {_SHARDS: json.dumps(shards)})
        apply_umask([file])
        flush(file)
        flush(file.parent)
        return compute_checksum(file)
    except (OSError, SafetensorError) as error:
        raise RunFailed(reason(error, file)) from None


@torch.no_grad()
def load_state(model: nn.Module, optimizer: Optimizer | None, files: Sequence[Path]) -> None:
    """Read in place what all ranks of some number wrote with :func:`write_part`; without an optimizer weights alone.

    Raises RunFailed where the files are of another model, or not all there.
    """
    with ExitStack() as opened:
        try:
            saved = _CheckpointFiles([opened.enter_context(safe_open(file, "pt")) for file in files])
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise RunFailed(f"a file of the checkpoint in {files[0].parent} cannot be read: {error}") from None
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if apart := sorted(parameters.keys() ^ saved.names):
            where = "there" if apart[0] in saved.names else "here"
            raise RunFailed(f"the checkpoint is of another model: {apart[0]} is only {where}")
        for name, p in parameters.items():
            kinds = [_WEIGHT] if optimizer is None else saved.kinds(name)
            values = {kind: saved.rows(kind, name, p) for kind in kinds}
            _put(p, values, {} if optimizer is None else optimizer.state[p])


class _CheckpointFiles:
    """The files of a checkpoint, opened."""

    def __init__(self, files: Sequence[Any]) -> None:
        self._files = [(file, set(file.keys()), json.loads(file.metadata()[_SHARDS])) for file in files]
        self._kinds: dict[str, set[str]] = {}
        for _, keys, _ in self._files:
            for key in keys:
                kind, _, name = key.partition(".")
                self._kinds.setdefault(name, set()).add(kind)

    @property
    def names(self) -> set[str]:
        """Of all parameters."""
        return set(self._kinds)

    def kinds(self, name: str) -> list[str]:
        """Return what a parameter has: its weight, and the optimizer's state of it. On all ranks in one order."""
        return sorted(self._kinds[name])

    def rows(self, kind: str, name: str, p: Tensor) -> Tensor:
        """Return those of a parameter's weight or moment that this rank holds, gathered from all files."""
        start, local = _start(p), take_local(p)
        parts: list[tuple[int, Tensor]] = []
        for file, keys, shards in self._files:
            if (key := f"{kind}.{name}") not in keys:
                continue
            if shards[name]["shape"] != list(p.shape):
                raise RunFailed(
                    f"the checkpoint is of another model: {name} is {shards[name]['shape']} there, {list(p.shape)} here"
                )
            shape = (tensor := file.get_slice(key)).get_shape()
            if not shape:  # the number of steps, which is of the whole parameter
                return torch.as_tensor(file.get_tensor(key)).clone()
            first = shards[name]["start"]
            low, high = max(start, first), min(start + len(local), first + shape[0])
            if low < high:
                parts.append((low, tensor[low - first : high - first]))
        none = local.new_empty(0, *local.shape[1:], device="cpu")
        whole = torch.cat([none, *(rows for _, rows in sorted(parts, key=lambda at: at[0]))])
        if whole.shape != local.shape:
            raise RunFailed(f"the checkpoint lacks {len(local) - len(whole)} rows of {kind} of {name}")
        return whole


def _put(p: Tensor, values: Mapping[str, Tensor], state: dict[str, Tensor]) -> None:
    """Set a parameter's local rows, and the optimizer's state of it."""
    for name, value in values.items():
        if name == _WEIGHT:
            take_local(p).copy_(value)
        elif name in state:  # where the optimizer keeps it
            take_local(state[name]).copy_(value)
        elif value.ndim:
            state[name] = torch.zeros_like(p)
            take_local(state[name]).copy_(value)
        else:
            state[name] = value.to(take_local(p).device)  # where a fused step counts


@torch.no_grad()
def move(model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
    """Move weights and optimizer state of one rank to ``device``, unless that lives on the host. No collective."""
    model.to(device)
    if isinstance(optimizer, HostAdamW):
        return
    for p in parameters_of(optimizer):
        state = optimizer.state.get(p, {})
        state.update({name: value.to(device) for name, value in state.items()})


def _named_parameters(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def _start(p: Tensor) -> int:
    """Return the first row of a parameter that this rank holds. FSDP2 shards the first dimension."""
    if not isinstance(p, DTensor):
        return 0
    _, offsets = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return int(offsets[0])
