"""``nccl_m2n`` on CPUs: gloo in place of NCCL and of ``nccl.m2n``, under vLLM's own engines at both ends.

What is not tried so: NVIDIA's library and streams, and engines of several processes.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import math
import os
import sys
import types
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from gkd.actor.worker import ActorWorker
from gkd.rollout.worker import RolloutWorker
from gkd.weights.nccl_m2n import NcclM2n

ID_BYTES = 128  # of NCCL's ids
LIMIT = datetime.timedelta(seconds=60)
STORES: dict[str, Any] = {}
JOINED: list[tuple[int, int]] = []
"""Rank and size of the groups that this process has been in."""
ENDS_AFTER: list[int] = []
"""In how many tensors this process is to die; empty: not at all."""
IN_PLACE: list[int] = []
"""How many tensors vLLM receives straight into its parameters, by group."""


class GlooM2n(NcclM2n):
    """Between processes on any device."""

    @classmethod
    def new_address(cls) -> str:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        STORES[address := f"127.0.0.1:{store.port}"] = store
        return base64.b64encode(address.encode().ljust(ID_BYTES)).decode()

    @classmethod
    def find_obstacle(cls, actor: Any, rollout: Any) -> None:
        return None


class Communicator:
    """What vLLM's ``PyNcclCommunicator`` is to the backend."""

    disabled = False
    device = torch.device("cpu")

    def __init__(self, unique_id: bytes, rank: int, world: int) -> None:
        address = unique_id.decode().strip()
        host, _, port = address.rpartition(":")
        store = STORES.get(address) or dist.TCPStore(host, int(port), is_master=False, timeout=LIMIT)
        self.rank, self.world_size = rank, world
        self.group = dist.ProcessGroupGloo(store, rank, world, LIMIT)
        self.group.allreduce([torch.zeros(1)]).wait()  # nobody goes on before all are here
        JOINED.append((rank, world))

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self.group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()

    def destroy(self) -> None:
        """Leave it."""


@dataclass(frozen=True)
class Mesh:
    """Ranks from ``start_rank`` on, row by row."""

    dims: tuple[int, int]
    start_rank: int

    def place_of(self, rank: int, axis: int) -> int:
        return divmod(rank - self.start_rank, self.dims[1])[axis]


@dataclass(frozen=True)
class Shard:
    """In parts along ``dim``."""

    dim: int


class Replicate:
    """The same everywhere."""


@dataclass(frozen=True)
class Parts:
    """How one side has a tensor: in ``n`` parts along ``dim``, over ``axis`` of the mesh."""

    mesh: Mesh
    axis: int
    dim: int

    @classmethod
    def of(cls, mesh: Mesh, placements: list[Any]) -> Parts:
        ((axis, shard),) = [(axis, its) for axis, its in enumerate(placements) if isinstance(its, Shard)]
        return cls(mesh, axis, shard.dim)

    @property
    def n(self) -> int:
        return self.mesh.dims[self.axis]

    def times(self, shape: torch.Size | list[int], factor: float) -> list[int]:
        return [round(size * factor) if dim == self.dim else size for dim, size in enumerate(shape)]


def reshard(
    source: Tensor | None, target: Tensor | None, comm: Communicator, stream: Any, *,
    src_mesh: Mesh, src_placements: list[Any], dst_mesh: Mesh, dst_placements: list[Any], handle: Any,
) -> None:  # fmt: skip
    """Every part of the source goes to everybody, who keeps the part that is theirs."""
    if ENDS_AFTER:
        ENDS_AFTER[0] -= 1
        if not ENDS_AFTER[0]:
            os._exit(3)
    src, dst = Parts.of(src_mesh, src_placements), Parts.of(dst_mesh, dst_placements)
    local = target if source is None else source
    whole = dst.times(local.shape, dst.n) if source is None else src.times(local.shape, src.n)
    step = src_mesh.dims[1] if src.axis == 0 else 1
    parts = []
    for number in range(src.n):
        owner = src_mesh.start_rank + step * number
        part = source.clone() if comm.rank == owner else torch.empty(src.times(whole, 1 / src.n), dtype=local.dtype)
        comm.broadcast(part, owner)
        parts.append(part)
    if target is not None:
        assert math.prod(whole) == sum(part.numel() for part in parts)
        target.copy_(torch.cat(parts, src.dim).chunk(dst.n, dst.dim)[dst_mesh.place_of(comm.rank, dst.axis)])


class Nothing:
    """A stream or a handle of the library, of which a CPU has none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take whatever there is."""

    create = classmethod(lambda cls, *args: cls())

    def synchronize(self) -> None:
        """All is done."""

    destroy = synchronize


def install() -> None:
    """Put all this in its place, in a process of its own."""
    from vllm.distributed.weight_transfer import m2n_engine, m2n_trainer, nccl_common

    module = types.ModuleType("nccl.m2n")
    vars(module).update(
        reshard=reshard, Mesh=Mesh, Shard=Shard, Replicate=Replicate, Handle=Nothing, Config=Nothing
    )  # fmt: skip
    module.__spec__ = ModuleSpec("nccl.m2n", None)  # by which it is found to be installed
    sys.modules["nccl"] = parent = types.ModuleType("nccl")
    sys.modules["nccl.m2n"] = parent.m2n = module
    for place in (m2n_trainer, nccl_common):
        place.uid_init_process_group = lambda unique_id, rank, world_size, device: Communicator(
            unique_id, rank, world_size
        )
    for place in (m2n_trainer, m2n_engine):
        place.comm_ptr = lambda comm: comm
    resolve = m2n_engine.resolve_parameter_destinations

    def counted(*args: Any, **kwargs: Any) -> Any:
        plan = resolve(*args, **kwargs)
        IN_PLACE.append(sum(destination.direct for destination in plan))
        return plan

    m2n_engine.resolve_parameter_destinations = counted
    torch.cuda.current_stream = torch.cuda.Stream = Nothing
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.synchronize = lambda: None
    Tensor.record_stream = lambda tensor, stream: None


class Actor(ActorWorker):
    """A rank of the actor."""

    def __init__(self, *args: Any) -> None:
        install()
        super().__init__(*args)


class Rollout(RolloutWorker):
    """An engine's worker. Its linear layers keep their weights as a GPU's do, instead of packed for a CPU's kernels."""

    def __init__(self, *args: Any) -> None:
        install()
        from vllm.model_executor.layers import utils

        utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(layer, "cpu_linear", linear)
        super().__init__(*args)

    def end_after(self, n: int) -> None:
        ENDS_AFTER.append(n)

    def joined(self) -> tuple[list[tuple[int, int]], list[int]]:
        return JOINED, IN_PLACE
