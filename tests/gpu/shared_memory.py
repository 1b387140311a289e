"""Memory of :mod:`tests.gpu.other_device` that processes share: files in place of CUDA's inter-process memory.

As torch does, a process keeps what it has shared for as long as another may have it open: until that one has closed
it, or is counted as gone. Takes the place of torch's functions, for the life of the process.
"""

from __future__ import annotations

import inspect
import uuid
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from tests.gpu.other_device import OnDevice

TOTAL = 80 << 30
PARAMETERS = tuple(inspect.signature(reductions.rebuild_cuda_tensor).parameters)


class SharedMemory:
    """Files in ``directory``; one beside each says that the one process that may open it has not closed it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.held: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        """What this process shares, and how many bytes these are."""

    def share(self, tensor: OnDevice) -> tuple[Any, tuple[Any, ...]]:
        """Return, as ``reduce_tensor``, a function and arguments for it that open the tensor elsewhere."""
        handle = self.directory / uuid.uuid4().hex
        handle.write_bytes(tensor.host.contiguous().view(torch.uint8).numpy().tobytes())
        self.counter(str(handle), 7).touch()
        self.held[str(handle)] = weakref.ref(tensor), tensor.nbytes
        known = {
            "tensor_size": tuple(tensor.shape), "dtype": tensor.dtype, "storage_device": 0,
            "storage_handle": str(handle), "ref_counter_handle": str(handle), "ref_counter_offset": 7,
        }  # fmt: skip
        return reductions.rebuild_cuda_tensor, tuple(known.get(name) for name in PARAMETERS)

    def open(self, *arguments: Any) -> Tensor:
        """Return the tensor that was shared; it is closed with the last reference to it."""
        known = dict(zip(PARAMETERS, arguments, strict=True))
        assert known["storage_device"] == 0
        data = bytearray(Path(known["storage_handle"]).read_bytes())
        opened = OnDevice(torch.frombuffer(data, dtype=torch.uint8).view(known["dtype"]).view(known["tensor_size"]))
        weakref.finalize(opened, self.close, known["ref_counter_handle"], known["ref_counter_offset"])
        return opened

    def close(self, handle: str, offset: int) -> None:
        """Count a tensor as closed by who had it open or might open it."""
        self.counter(handle, offset).unlink()

    def counter(self, handle: str, offset: int) -> Path:
        """Return the file that is there while a tensor may be open elsewhere."""
        assert offset == 7
        return Path(f"{handle}.open")

    def allocated(self) -> int:
        """Return the bytes of what this process shares, until all who had it have closed it."""
        for handle, (tensor, _) in list(self.held.items()):
            if tensor() is None and not self.counter(handle, 7).exists():
                Path(handle).unlink()
                del self.held[handle]
        return sum(n_bytes for _, n_bytes in self.held.values())


def set_up(directory: Path) -> SharedMemory:
    """Have this process share by files in ``directory``, which others share by as well."""
    memory = SharedMemory(directory)
    reductions.reduce_tensor = memory.share
    reductions.rebuild_cuda_tensor = memory.open
    torch.UntypedStorage._release_ipc_counter_cuda = memory.close  # type: ignore[attr-defined]
    torch.cuda.ipc_collect = memory.allocated  # type: ignore[assignment]
    torch.cuda.memory_allocated = memory.allocated  # type: ignore[assignment]
    torch.cuda.mem_get_info = lambda: (TOTAL - memory.allocated(), TOTAL)  # type: ignore[assignment]
    torch.cuda.synchronize = lambda: None  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid="0")  # type: ignore[assignment]
    return memory
