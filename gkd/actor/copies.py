"""Copies of the student: each is sharded over ranks of its own, and gradients are summed over all (HSDP)."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from gkd.actor.optimizer import take_local


@dataclass(frozen=True, slots=True)
class Copies:
    """Holds a rank's place among ``n`` copies of the student, that with this ``number``.

    ``mesh``: the ranks that hold this copy together; ``group``: those that have the same shard of each, None of one.
    """

    n: int
    number: int
    mesh: DeviceMesh
    group: dist.ProcessGroup | None = None

    @classmethod
    def join(cls, device: str, world: int, size: int, limit: datetime.timedelta) -> Copies:
        """Return those of ``world`` ranks, of which ``size`` neighbours hold a copy. A collective.

        Ranks wait for each other for ``limit`` at most, as in the group of all of them.
        """
        if size == world:
            return cls(1, 0, dist.device_mesh.init_device_mesh(device, (world,)))
        whole = dist.device_mesh.init_device_mesh(device, (world // size, size), mesh_dim_names=("copies", "shards"))
        for group in whole.get_all_groups():  # which torch gives half an hour
            _set_pg_timeout(limit, group)
        for met in (whole.get_group("copies"), None):  # NCCL takes its memory now, while torch holds none of the GPU
            dist.all_reduce(torch.zeros(1, device=device), group=met)
        return cls(world // size, whole.get_local_rank("copies"), whole["shards"], whole.get_group("copies"))

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Give every copy the sum of all copies' gradients. A collective.

        One that a copy has not, as of an expert that none of its tokens went to, is 0 where another has it.
        """
        if self.group is None:
            return
        trained = [p for p in parameters if p.requires_grad]
        has_gradient = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32)
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX)  # among the hosts
        for p, any_has in zip(trained, has_gradient.tolist(), strict=True):
            if any_has:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(take_local(p.grad), group=self.group)
