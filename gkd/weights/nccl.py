"""Weights between GPUs: actor rank 0 broadcasts every bucket to all workers of all engines, over NCCL.

The group is vLLM's communicator, joined by the id that actor rank 0 makes: NCCL itself opens a port in that process,
and the id travels in Ray calls of this run's driver. (vLLM's other way to meet, a store at an agreed port, unpickles
what it finds there.) NCCL has no deadlines: the driver has (:mod:`gkd.driver.groups.weight_sync`), and ends the
processes of a run that waits in vain.

Nothing of this has run on GPUs so far.
"""

from __future__ import annotations

import base64
import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gkd.config.transfer import Place
from gkd.errors import RunFailed
from gkd.weights.packing import PackedLayout, PackedTransfer, PackingSender, unpack
from gkd.weights.transfer import Bucket, Receiver, find_gpu_obstacle, find_shared_gpu

if TYPE_CHECKING:
    from torch import Tensor

ROOT = 0
"""Rank of the actor in the group; the engines' workers follow."""


class NcclSender(PackingSender):
    """Broadcasts from actor rank 0."""

    group: Any = None

    def pack(self, tensors: dict[str, Tensor], bucket: Bucket) -> PackedLayout:
        """Return the layout of the buffer, whose bytes :meth:`broadcast` sends."""
        return self.pack_buffer(tensors)

    def new_group(self) -> str:
        """Return what all ranks of a new group need to meet, base64. Raises RunFailed where NCCL cannot be loaded."""
        return make_unique_id("nccl")

    def join(self, address: str, world: int) -> None:
        """Join as the root. Leaves an earlier group."""
        if self.group is not None:
            self.group.destroy()
        with join_apart():
            self.group = _join(address, ROOT, world)

    def broadcast(self) -> None:
        """Send the packed bucket; returns when this GPU is done with it."""
        assert self.packed_bucket is not None, "a bucket is sent after it was packed, by the rank that packs"
        _broadcast(self.group, self.packed_bucket)


class NcclReceiver(Receiver):
    """Takes part in the broadcasts of actor rank 0."""

    group: Any = None

    def join(self, address: str, rank: int, world: int) -> None:
        """Join as rank ``rank``. Leaves an earlier group."""
        self.close()
        self.group = _join(address, rank, world)

    def receive(self, bucket: Bucket) -> dict[str, Tensor]:
        """Return the tensors in the buffer that actor rank 0 broadcasts. Raises RunFailed outside of a group."""
        import torch

        if self.group is None:
            raise RunFailed(f"{bucket}: this engine is in no NCCL group with the actor")
        layout: PackedLayout = bucket.contents[0]
        packed = torch.empty(layout.n_bytes, dtype=torch.uint8, device=self.device)
        _broadcast(self.group, packed)
        return unpack(bucket, layout, packed)

    def close(self) -> None:
        """Leave the group."""
        if self.group is not None:
            self.group.destroy()
            self.group = None


class Nccl(PackedTransfer):
    """A broadcast from actor rank 0's GPU to other GPUs."""

    collective = True
    sender = NcclSender
    receiver = NcclReceiver

    @classmethod
    def find_obstacle(cls, actor: Sequence[Place], rollout: Sequence[Place]) -> str | None:
        """Return why engines and actor rank 0 are not each on GPUs of their own; None where they are."""
        return find_gpu_obstacle((*actor, *rollout)) or find_shared_gpu((actor[0], *rollout))


def make_unique_id(way: str) -> str:
    """Return an id that a new group meets by, base64. Raises RunFailed where NCCL cannot be loaded."""
    try:
        made = load_library().ncclGetUniqueId()
    except (OSError, ValueError, RuntimeError) as error:
        raise RunFailed(f"weights.transfer={way}: NCCL cannot be used here: {error}") from None
    return base64.b64encode(ctypes.string_at(ctypes.addressof(made), ctypes.sizeof(made))).decode()


def load_library() -> Any:
    """Return vLLM's NCCL, an older one too: torch 2.11 comes with 2.28, and vLLM looks up functions of 2.29.7.

    Those are for the memory of communicators that sleep, which this project's do not; vLLM asks before it calls them.
    Raises OSError or ValueError where there is none.
    """
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.utils.nccl import find_nccl_library

    library = ctypes.CDLL(find_nccl_library())
    NCCLLibrary.exported_functions = [f for f in NCCLLibrary.exported_functions if hasattr(library, f.name)]
    return NCCLLibrary()


@contextmanager
def join_apart() -> Iterator[None]:
    """Join a group on a stream aside: vLLM would make a new one that all after runs on, training as well.

    What torch holds of the GPU and does not use is given back first: NCCL takes its memory from what is free.
    """
    import torch

    torch.cuda.empty_cache()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        yield


def _join(address: str, rank: int, world: int) -> Any:
    """Return vLLM's communicator on the current GPU. Raises ValueError for an address that is no id of NCCL's."""
    import torch
    from vllm.distributed.weight_transfer.nccl_common import decode_nccl_unique_id, uid_init_process_group

    unique_id = decode_nccl_unique_id(
        master_address=None, master_port=None, nccl_unique_id_b64=address, ctx="weights.transfer=nccl"
    )
    device = torch.accelerator.current_device_index()
    load_library()
    return require_enabled("nccl", uid_init_process_group(unique_id, rank, world, device))


def require_enabled(transfer: str, group: Any) -> Any:
    """Return vLLM's communicator. Raises RunFailed for one that is disabled, which would do nothing, silently."""
    if group.disabled:
        raise RunFailed(f"weights.transfer={transfer}: vLLM's NCCL communicator is disabled (VLLM_DISABLE_PYNCCL)")
    return group


def _broadcast(group: Any, packed: Tensor) -> None:
    import torch

    stream = torch.cuda.current_stream(packed.device)
    group.broadcast(packed, src=ROOT, stream=stream)
    stream.synchronize()
