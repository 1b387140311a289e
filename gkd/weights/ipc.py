"""Weights between processes on one GPU: an actor rank packs a bucket, the engine there opens that memory and copies it.

CUDA's inter-process memory. The handles, bytes and numbers in torch's own form, travel in Ray calls of this run's
workers: who may call them is trusted, as with every other call, and nothing is read from another socket. (vLLM's
pickled form of them, for HTTP, is not used.) Buckets are of weights.bucket_mb, or of the largest tensor where that is
larger.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gkd.config.transfer import Place
from gkd.errors import ConfigError, RunFailed
from gkd.weights.packing import PackedLayout, PackedTransfer, PackingSender, unpack
from gkd.weights.transfer import Bucket, Receiver, find_gpu_obstacle

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gkd.config import Weights

_DEVICE = 6  # place of the device's index among the arguments of torch's rebuild_cuda_tensor
_COUNTER = slice(11, 13)  # and of the file, and the place in it, that count the processes which have the memory open

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """A packed bucket in the memory of the GPU ``gpu``, and the ``handle`` that one process there may open once."""

    layout: PackedLayout
    gpu: str
    handle: tuple[Any, ...]


class IpcSender(PackingSender):
    """Packs a bucket and shares the buffer with the processes on this GPU."""

    def __init__(self, settings: Weights, device: torch.device) -> None:
        _require_shareable_memory()
        super().__init__(settings, device)
        self._counters: deque[tuple[Any, ...]] = deque()
        """Of the buffers that are held: where torch counts, in memory that processes share, who has each open."""

    def pack(self, tensors: dict[str, Tensor], bucket: Bucket) -> SharedBuffer:
        """Return the layout of the buffer and its handle."""
        layout = self.pack_buffer(tensors)
        return SharedBuffer(layout, *self.export_buffer())

    def export_buffer(self) -> tuple[str, tuple[Any, ...]]:
        """Return the UUID of this GPU, and a handle of the packed buffer."""
        import torch
        from torch.multiprocessing import reductions

        torch.cuda.current_stream(self.device).synchronize()  # another process does not see this one's streams
        _, arguments = reductions.reduce_tensor(self.packed_bucket)  # type: ignore[no-untyped-call]
        self._counters.append(arguments[_COUNTER])
        return gpu_of(self.device), arguments

    def forget_receivers(self) -> None:
        """Close the held buffers for the engine on this GPU, which is gone: torch would keep them for good."""
        import torch

        for counter in self._counters:
            torch.UntypedStorage._release_ipc_counter_cuda(*counter)

    def release(self, keep: int = 0) -> None:
        """Free buffers, which the engine has closed."""
        import torch

        super().release(keep)
        while len(self._counters) > keep:
            self._counters.popleft()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # gives back what an engine had open


class IpcReceiver(Receiver):
    """Opens the buffer of the actor rank on the same GPU."""

    def receive(self, bucket: Bucket) -> dict[str, Tensor]:
        """Return the tensors in a copy of the buffer.

        A copy, because vLLM keeps what it is given until a layer is complete, and the actor packs the next bucket
        before. Raises RunFailed when no actor rank on this GPU has packed the bucket.
        """
        shared = buffer_on(bucket, self.gpu())
        return unpack(bucket, shared.layout, self.open(shared))

    def gpu(self) -> str:
        """Return the UUID of this process' GPU."""
        return gpu_of(self.device)

    def open(self, shared: SharedBuffer) -> Tensor:
        """Return a copy of a shared buffer."""
        import torch
        from torch.multiprocessing import reductions

        opened = (*shared.handle[:_DEVICE], self.device.index, *shared.handle[_DEVICE + 1 :])
        buffer: Tensor = reductions.rebuild_cuda_tensor(*opened)  # type: ignore[no-untyped-call]
        copy = buffer.clone()
        torch.cuda.current_stream(self.device).synchronize()  # ``buffer`` is closed on return
        return copy


class Ipc(PackedTransfer):
    """CUDA memory that processes on one GPU share."""

    expandable_segments = False
    sender = IpcSender
    receiver = IpcReceiver

    @classmethod
    def find_obstacle(cls, actor: Sequence[Place], rollout: Sequence[Place]) -> str | None:
        """Return why not every engine's process shares its GPU with an actor rank; None where each does."""
        if reason := find_gpu_obstacle((*actor, *rollout)):
            return reason
        shared = {uuid for worker in actor for uuid in worker.gpu_uuids}
        alone = [worker for worker in rollout if not set(worker.gpu_uuids) <= shared]
        return f"{alone[0]} is on a GPU without an actor, {alone[0].gpu_uuids[0]}" if alone else None

    @classmethod
    def packing(cls, actor: Sequence[Place], gpus: set[str]) -> list[bool]:
        """Return every rank that shares its GPU with an engine. A handle that nobody opens would keep its memory for
        good.
        """
        return [not gpus.isdisjoint(worker.gpu_uuids) for worker in actor]


def buffer_on(bucket: Bucket, gpu: str) -> SharedBuffer:
    """Return the buffer of a bucket on ``gpu``. Raises RunFailed when no actor rank there has packed it."""
    buffers: dict[str, SharedBuffer] = {shared.gpu: shared for shared in bucket.contents}
    if gpu not in buffers:
        raise RunFailed(f"{bucket}: no actor rank on GPU {gpu} has packed it, only on {', '.join(buffers)}")
    return buffers[gpu]


def gpu_of(device: torch.device) -> str:
    """Return the UUID of a GPU, as torch writes it in every process."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def _require_shareable_memory() -> None:
    """Raise ConfigError where torch's allocator is set to expandable segments, whose memory has no such handles."""
    for name in _ALLOCATOR:
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            raise ConfigError(
                f"{name}={os.environ[name]}: memory of expandable segments cannot be shared by weights.transfer=ipc; "
                "unset it, or weights.transfer=object_store"
            )
