"""Weights between processes on one GPU: an actor rank packs a piece, the engine there opens that memory and copies it.

CUDA's inter-process memory. The handles, bytes and numbers in torch's own form, travel in Ray calls of this run's
driver: who may call its workers is trusted, as with every other call, and nothing is read from another socket. (vLLM's
pickled form of them, for HTTP, is not used.) The memory this takes beside the model's: while packing, the gathered
tensors of a piece and their copy; while loading, that copy and the engine's. Pieces are of weights.bucket_mb, or of
the largest tensor where that is larger.

Nothing of this has run on a GPU so far.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from gkd.errors import ConfigError, RunFailed
from gkd.weights.pieces import Packer, Piece

_DEVICE = 6  # place of the device's index among the arguments of torch's rebuild_cuda_tensor

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def require_shareable_memory() -> None:
    """Raise ConfigError where torch's allocator is set to expandable segments, whose memory has no such handles."""
    for name in _ALLOCATOR:
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            raise ConfigError(
                f"{name}={os.environ[name]}: memory of expandable segments cannot be shared by weights.transfer=ipc; "
                "unset it, or weights.transfer=object_store"
            )


class Sender(Packer):
    """An actor rank's end."""

    def next(self) -> Piece | None:
        """The next piece, with a handle of this rank's buffer. The engine has closed the one before."""
        self.packed = None
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # gives back what an engine had open
        return super().next()

    def shown(self, piece: Piece) -> Piece:
        """``piece`` with a handle that one process on this GPU may open once."""
        assert self.packed is not None
        torch.cuda.current_stream(self.device).synchronize()  # another process does not see this one's streams
        _, arguments = reductions.reduce_tensor(self.packed)  # type: ignore[no-untyped-call]
        return replace(super().shown(piece), handles={gpu_of(self.device): arguments})


def receive(piece: Piece, device: torch.device) -> Tensor:
    """In an engine on ``device``: a copy of the buffer that the actor rank there has packed.

    A copy, because vLLM keeps what it is given until a layer is complete, and the actor packs the next piece before.
    """
    arguments = handle_for(piece, gpu_of(device))
    opened = (*arguments[:_DEVICE], device.index, *arguments[_DEVICE + 1 :])
    shared: Tensor = reductions.rebuild_cuda_tensor(*opened)  # type: ignore[no-untyped-call]
    copy = shared.clone()
    torch.cuda.current_stream(device).synchronize()  # ``shared`` is closed on return
    return copy


def handle_for(piece: Piece, gpu: str) -> tuple[object, ...]:
    """What opens a piece's buffer on ``gpu``. Raises RunFailed when no actor rank there has packed it."""
    if gpu not in piece.handles:
        raise RunFailed(f"{piece}: no actor rank on GPU {gpu} has packed it, only on {', '.join(piece.handles)}")
    return piece.handles[gpu]


def gpu_of(device: torch.device) -> str:
    """The UUID of a GPU, as torch writes it in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)
