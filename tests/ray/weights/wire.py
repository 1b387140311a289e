"""Both ends of a push on CPUs, for Ray workers: the real actor and rollout workers, with another wire between them.

What CUDA does is done by a copy (``ipc``: the "handle" is the buffer itself) or by gloo (``nccl``: the same id, meeting
and broadcasts, which block as NCCL's do). The engine keeps tensors instead of sampling with them.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gkd.actor.worker import ActorWorker
from gkd.config import Config
from gkd.data.model_info import ModelInfo
from gkd.errors import RunFailed
from gkd.inference.engine import EngineSpec, Finished
from gkd.rollout import worker as rollout_worker
from gkd.types import Request
from gkd.weights import ipc, nccl
from gkd.weights.pieces import Packer, Piece, unpack


class Gloo:
    """A group like NCCL's."""

    def __init__(self, unique_id: str, rank: int, world: int, store: Any = None) -> None:
        host, _, port = unique_id.rpartition(":")
        limit = datetime.timedelta(seconds=60)
        store = store or dist.TCPStore(host, int(port), world, is_master=False, timeout=limit)
        self.group = dist.ProcessGroupGloo(store, rank, world, limit)
        self.group.allreduce([torch.zeros(1)]).wait()  # nobody goes on before all are here

    def broadcast(self, packed: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = nccl.ROOT
        self.group.broadcast([packed], options).wait()


class CopySender(ipc.Sender):
    """Hands out the buffer itself."""

    gpu = ""

    def next(self) -> Piece | None:
        return Packer.next(self)

    def shown(self, piece: Piece) -> Piece:
        return replace(Packer.shown(self, piece), handles={self.gpu: (self.packed,)})


class GlooSender(nccl.Sender):
    """Broadcasts over gloo."""

    def join(self, unique_id: str, world: int) -> None:
        self.group = Gloo(unique_id, nccl.ROOT, world, self.store)

    def send(self) -> None:
        self.group.broadcast(self.packed)


class CpuActor(ActorWorker):
    """A real actor rank on a CPU that sends by ``ipc`` and ``nccl``. ``gpus``: the UUID that each rank is to be on."""

    def __init__(self, config: Config, path: str, rank: int, world: int, gpus: list[str]) -> None:
        super().__init__(config, path, rank, world, "cpu")
        self.gpu = gpus[rank]

    @cached_property
    def _sender(self) -> Packer:
        settings = self.config.weights
        kind = {"ipc": CopySender, "nccl": GlooSender}[settings.transfer]
        sender = kind(self.device, settings.bucket_mb << 20, settings.checksum)
        sender.gpu = self.gpu
        return sender

    def new_group(self) -> str:
        self._sender.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return f"127.0.0.1:{self._sender.store.port}"

    def use(self, config: Config) -> None:
        """Send another way from now on."""
        self.config = config
        vars(self).pop("_sender", None)

    def weights(self) -> dict[str, Tensor]:
        """All of them, gathered. A collective."""
        return {name: t.clone() for name, t in self.student.full_tensors(self.dtype)}


class Keeper:
    """An engine that keeps what it is given."""

    def __init__(self, gpu: str) -> None:
        self.gpu, self.group = gpu, None
        self.tensors: dict[str, Tensor] = {}
        self.groups: list[tuple[int, int]] = []
        self.pieces = 0
        self.trouble: tuple[str, int] | None = None

    def add(self, key: int, request: Request) -> None:
        raise AssertionError("no test samples")

    def busy(self) -> bool:
        return False

    def step(self) -> list[Finished]:
        return []

    def load_weights(self, pieces: Iterable[dict[str, Tensor]], version: int) -> None:
        self.tensors = {name: t for piece in pieces for name, t in piece.items()}

    def join(self, unique_id: str, offset: int, world: int) -> None:
        self._maybe("join", 0)
        self.group = Gloo(unique_id, offset, world)
        self.groups.append((offset, world))

    def take(self, piece: Piece) -> None:
        if piece.number == 0:
            self.tensors, self.pieces = {}, 0
        self._maybe("take", piece.number)
        if piece.handles:
            packed = ipc.handle_for(piece, self.gpu)[0].clone()
        else:
            packed = torch.empty(piece.n_bytes, dtype=torch.uint8)
            if self.group is None:
                raise RunFailed("no group")
            self.group.broadcast(packed)
        if self._has("damage", piece.number):
            packed[7] ^= 1
        self.tensors |= {name: t.clone() for name, t in unpack(piece, packed).items()}
        self.pieces += 1

    def finish(self, version: int) -> None:
        assert self.pieces > 1

    def _has(self, what: str, number: int) -> bool:
        return self.trouble == (what, number)

    def _maybe(self, where: str, number: int) -> None:
        if self._has(f"die in {where}", number):
            os._exit(3)
        if self._has(f"hang in {where}", number):
            time.sleep(60)


class CpuRollout(rollout_worker.RolloutWorker):
    """A real rollout worker around a :class:`Keeper`."""

    def __init__(self, config: Config, rank: int, gpus: list[str]) -> None:
        rollout_worker._engine = lambda *_: Keeper(gpus[rank])
        rollout_worker.load_tokenizer = lambda *_: None
        super().__init__(config, EngineSpec("", ModelInfo(1, 1, [], 1), 1, rank, "cpu"))

    def use(self, config: Config, gpus: list[str]) -> None:
        """Have other settings from now on, and believe to be on another GPU."""
        self.config, self.engine.gpu = config, gpus[self.rank]

    def make_trouble(self, what: str, number: int) -> None:
        self.engine.trouble = (what, number)

    def found(self) -> tuple[dict[str, Tensor], int, bool, int, list[tuple[int, int]]]:
        """Tensors, version, whether it may sample, pieces of the last push, and NCCL groups it has been in."""
        engine = self.engine
        return engine.tensors, self.version, self._intact, engine.pieces, engine.groups
