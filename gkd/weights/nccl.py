"""Weights between GPUs: actor rank 0 broadcasts every piece to all workers of all engines, over NCCL.

The group is vLLM's communicator, joined by the id that actor rank 0 makes: NCCL itself opens a port in that process,
and the id travels in Ray calls of this run's driver. (vLLM's other way to meet, a store at an agreed port, unpickles
what it finds there.) NCCL has no deadlines: the driver has (:mod:`gkd.driver.weight_sync`), and ends the processes of a
run that waits in vain.

Nothing of this has run on GPUs so far.
"""

from __future__ import annotations

import base64
import ctypes
from typing import Any

import torch
from torch import Tensor

from gkd.errors import RunFailed
from gkd.weights.pieces import Packer, Piece

ROOT = 0
"""Rank of the actor in the group; the engines' workers follow."""


def new_id() -> str:
    """On actor rank 0: what all ranks of a new group need to meet, base64.

    Raises RunFailed where NCCL cannot be loaded.
    """
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    try:
        made = NCCLLibrary().ncclGetUniqueId()
    except (OSError, ValueError, RuntimeError) as error:
        raise RunFailed(f"weights.transfer=nccl: NCCL cannot be used here: {error}") from None
    return base64.b64encode(ctypes.string_at(ctypes.addressof(made), ctypes.sizeof(made))).decode()


class Sender(Packer):
    """Actor rank 0's end; other ranks only gather."""

    group: Any = None

    def join(self, unique_id: str, world: int) -> None:
        """Meet the ``world - 1`` workers of the engines, who do the same at the same time. Leaves an earlier group."""
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        if self.group is not None:
            self.group.destroy()
        # vLLM would otherwise make a new stream the one that everything after runs on, training as well.
        aside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(aside):
            device = torch.cuda.current_device()
            self.group = enabled(uid_init_process_group(base64.b64decode(unique_id), ROOT, world, device))

    def send(self) -> None:
        """Broadcast the present piece; returns when this GPU is done with it."""
        assert self.packed is not None, "a piece is sent after it was packed, by the rank that packs"
        _broadcast(self.group, self.packed)


def enabled(group: Any) -> Any:
    """vLLM's communicator. Raises RunFailed for one that is disabled, which would do nothing, silently."""
    if group.disabled:
        raise RunFailed("weights.transfer=nccl: vLLM's NCCL communicator is disabled (VLLM_DISABLE_PYNCCL)")
    return group


def receive(piece: Piece, group: Any, device: torch.device) -> Tensor:
    """In every worker of an engine: the buffer that actor rank 0 broadcasts. Raises RunFailed outside of a group."""
    if group is None:
        raise RunFailed(f"{piece}: this engine is in no NCCL group with the actor")
    packed = torch.empty(piece.n_bytes, dtype=torch.uint8, device=device)
    _broadcast(group, packed)
    return packed


def _broadcast(group: Any, packed: Tensor) -> None:
    stream = torch.cuda.current_stream(packed.device)
    group.broadcast(packed, src=ROOT, stream=stream)
    stream.synchronize()
