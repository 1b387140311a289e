"""Ways for a push on CPUs, and the real rollout worker at their end; the actor is in actor.py.

What CUDA does is done by a copy (``ipc``: the "handle" is the buffer itself) or by gloo (``nccl``: the same id, meeting
and broadcasts, which block as NCCL's do). The engine keeps tensors instead of sampling with them.
"""

from __future__ import annotations

import datetime
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor

from gkd.config import Config, Weights
from gkd.config.base import Settings
from gkd.data.model_info import ModelInfo
from gkd.errors import RunFailed
from gkd.inference.engine import EngineSpec, InferenceEngine
from gkd.rollout import pipeline
from gkd.rollout import worker as rollout_worker
from gkd.rollout.receiving import WeightLoader
from gkd.types import Sample, SampleRequest
from gkd.weights import ipc, nccl
from gkd.weights.packing import PackingSender, unpack
from gkd.weights.transfer import Bucket


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


class CopySender(ipc.IpcSender):
    """Hands out the buffer itself."""

    gpu = ""

    def export_buffer(self) -> tuple[str, tuple[Any, ...]]:
        return self.gpu, (self.packed_bucket,)

    def release(self, keep: int = 0) -> None:
        PackingSender.release(self, keep)


class CopyReceiver(ipc.IpcReceiver):
    """Copies the buffer; ``damages`` is the number of a bucket that it damages."""

    uuid = ""
    damages: int | None = None

    def gpu(self) -> str:
        return self.uuid

    def receive(self, bucket: Bucket) -> dict[str, Tensor]:
        self.number = bucket.number
        return super().receive(bucket)

    def open(self, shared: ipc.SharedBuffer) -> Tensor:
        packed = shared.handle[0].clone()
        if self.damages == self.number:
            packed[7] ^= 1
        return packed


class CopyIpc(ipc.Ipc):
    """``ipc`` with a copy in place of CUDA's memory."""

    sender, receiver = CopySender, CopyReceiver


class GlooSender(nccl.NcclSender):
    """Broadcasts over gloo."""

    def new_group(self) -> str:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return f"127.0.0.1:{self.store.port}"

    def join(self, address: str, world: int) -> None:
        if world < 2:  # as vLLM's communicator
            raise RunFailed("a group of one")
        self.group = Gloo(address, nccl.ROOT, world, self.store)

    def broadcast(self) -> None:
        self.group.broadcast(self.packed_bucket)


class GlooReceiver(nccl.NcclReceiver):
    """Takes part in the broadcasts."""

    def join(self, address: str, rank: int, world: int) -> None:
        self.group = Gloo(address, rank, world)

    def receive(self, bucket: Bucket) -> dict[str, Tensor]:
        layout = bucket.contents[0]
        packed = torch.empty(layout.n_bytes, dtype=torch.uint8)
        self.group.broadcast(packed)
        return unpack(bucket, layout, packed)


class GlooNccl(nccl.Nccl):
    """``nccl`` with gloo in place of NCCL."""

    sender, receiver = GlooSender, GlooReceiver


class Keeper(InferenceEngine[SampleRequest, Sample]):
    """An engine that keeps what it is given."""

    can_sample = gpu_transfers = True

    class Config(Settings):
        gpus_of_engines: list[str] = Field(
            [], description="by rank, the UUID of the GPU that an engine believes to be on"
        )

    def __init__(self, spec: EngineSpec) -> None:
        self.spec, self.trouble = spec, ("", 0)
        self.groups: list[tuple[int, int]] = []
        self.use(spec.weights, spec.settings.class_settings().gpus_of_engines)

    def use(self, weights: Weights, gpus: list[str]) -> None:
        """Receive another way from now on, and believe to be on another GPU."""
        self.receiver = weights.transfer_class.receiver(weights, torch.device("cpu"))
        self.receiver.uuid = gpus[self.spec.rank]
        self.tensors: dict[str, Tensor] = {}
        self.buckets = 0

    def add(self, key: int, request: SampleRequest) -> None:
        raise AssertionError("no test samples")

    def has_unfinished_requests(self) -> bool:
        return False

    def step(self) -> list[tuple[int, Sample]]:
        return []

    def load_weights(self, bucket: Bucket, tensors: dict[str, Tensor]) -> None:
        if bucket.number == 0:
            self.tensors, self.buckets = {}, 0
        self.tensors |= {name: t.clone() for name, t in tensors.items()}
        self.buckets += 1
        assert self.buckets == bucket.number + 1

    def join(self, address: str, offset: int, world: int) -> None:
        self._maybe("join", 0)
        self.receiver.join(address, offset, world)
        self.groups.append((offset, world))

    def receive_weights(self, bucket: Bucket) -> None:
        self._maybe("receive", bucket.number)
        what, number = self.trouble
        self.receiver.damages = number if what == "damage" else None
        self.load_weights(bucket, self.receiver.receive(bucket))

    def _maybe(self, where: str, number: int) -> None:
        if self.trouble == (f"die in {where}", number):
            os._exit(3)
        if self.trouble == (f"hang in {where}", number):
            time.sleep(60)
        if self.trouble[0] == f"slow in {where}":
            time.sleep(0.8)


class CpuRollout(rollout_worker.RolloutWorker):
    """A real rollout worker around a :class:`Keeper`."""

    def __init__(self, config: Config, rank: int) -> None:
        pipeline.load_tokenizer = lambda *_: None
        super().__init__(config, EngineSpec.for_rollout(config, "", ModelInfo(1, 1, [], 1), 1, rank, "cpu"))

    def use(self, config: Config, gpus: list[str]) -> None:
        """Have other settings from now on, and believe to be on another GPU."""
        self.weights = WeightLoader(
            config, self.rank, self.loop, self.sampler
        )  # pushes of this test count from 1 again
        self.engine.use(config.weights, gpus)

    def make_trouble(self, what: str, number: int) -> None:
        self.engine.trouble = (what, number)

    def do_long_step(self) -> None:
        """Have the engine's thread do a step of a minute, or up to the end of it, which nobody waits for."""
        self.step_ends = threading.Event()
        self.loop.submit(lambda: self.step_ends.wait(60))

    def end_long_step(self) -> None:
        self.step_ends.set()

    def state(self) -> tuple[dict[str, Tensor], int, bool, int, list[tuple[int, int]]]:
        """Tensors, version, whether it may sample, buckets of the last push, and NCCL groups it has been in."""
        engine = self.engine
        return engine.tensors, engine.version, not self.sampler.held, engine.buckets, engine.groups
