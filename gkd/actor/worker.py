"""The process of one rank of the actor: it meets the others, reads the student, and has the parts that use it."""

from __future__ import annotations

import datetime
from typing import Any

import ray
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from gkd.actor.batches import AppliedUpdate
from gkd.actor.compiling import Compilation, compile_student, use_liger
from gkd.actor.copies import Copies
from gkd.actor.loading import load_sharded
from gkd.actor.optimizer import adamw
from gkd.actor.publishing import WeightSource
from gkd.actor.rank_state import RankState
from gkd.actor.staging import Staging
from gkd.actor.training import RankTrainer
from gkd.cluster.host import cores
from gkd.cluster.workers.activity import report_here
from gkd.cluster.workers.environment import compute_threads
from gkd.config import Config
from gkd.config.device import Device


class ActorWorker:
    """The student on one GPU (or on CPU cores), one of ``world`` ranks.

    Built without a model; :meth:`open_store` on rank 0, then :meth:`join` and :meth:`load` on all. From then on
    ``trainer`` trains the student, ``state`` writes, keeps and moves what the rank has, and ``weights`` sends them to
    the engines; the driver calls their methods by these names, such as ``trainer.update``.
    """

    trainer: RankTrainer
    state: RankState

    def __init__(self, config: Config, model_path: str, rank: int, world: int, device: Device) -> None:
        self.config, self.model_path, self.rank, self.world = config, model_path, rank, world
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, config.model.dtype_on(device))
        torch.set_num_threads(_n_threads(config, model_path, world, device))
        self.weights = WeightSource(config.weights, self.device, self.dtype, config.rollout.tensor_parallel_size)

    def open_store(self) -> tuple[str, int]:
        """Open the rendezvous, on rank 0, on a port this process chooses; returns host and port."""
        host = ray.util.get_node_ip_address()
        self.store = dist.TCPStore(host, 0, self.world, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return host, self.store.port

    def join(self, host: str, port: int) -> None:
        """Meet the other ranks. Raises RunFailed when they do not come within cluster.start_timeout_s."""
        limit = datetime.timedelta(seconds=self.config.cluster.start_timeout_s)
        if self.device.type == "cuda":
            torch.cuda.set_device(0)  # the only one that is visible; torch would warn that it has to guess
        if self.rank:
            self.store = dist.TCPStore(host, port, self.world, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            store=self.store,
            rank=self.rank,
            world_size=self.world,
            timeout=self._collective_limit,
        )

    @property
    def _collective_limit(self) -> datetime.timedelta:
        """Time that ranks wait for each other, also while one reads or writes the model or waits for engines.

        The driver has a limit for each of these calls, and a push has its own again for every engine that hangs.
        """
        config, trainer = self.config, self.config.trainer
        push = config.weights.timeout_s * (1 + config.rollout.n_engines)
        limits = trainer.update_timeout_s, trainer.save_timeout_s, config.cluster.start_timeout_s, push
        return datetime.timedelta(seconds=max(limits))

    def load(self) -> int:
        """Read the student and shard it over the ranks. Returns its number of parameters."""
        torch.manual_seed(self.config.trainer.seed)
        actor = self.config.actor
        copies = Copies.join(self.device.type, self.world, actor.fsdp_size or self.world, self._collective_limit)
        student = load_sharded(
            self.model_path, copies.mesh, self.device, self.dtype,
            actor.gradient_checkpointing, actor.lora, actor.offload_weights, self._fuse,
            actor.most_copied(self.device.type == "cpu"),
        )  # fmt: skip
        staging, optimizer = Staging(self.device, writes=copies.number == 0), adamw(student, actor)
        staging.set(AppliedUpdate(0))
        self.trainer = RankTrainer(student, optimizer, staging, self.config, self.rank, self.world, self.device, copies)
        self.state = RankState(self.trainer, self.model_path, self.dtype)
        self.weights.trainer = self.trainer
        return sum(p.numel() for p in student.parameters())

    def _fuse(self, lm: PreTrainedModel) -> Compilation | None:
        """Have layers, which are not sharded yet, run as fewer kernels: ``actor.compile`` and ``actor.liger``."""
        actor = self.config.actor
        if actor.liger:
            use_liger(lm, self.device)
            return None
        return compile_student(lm, actor.compile, actor.micro_batch_tokens, self.device)

    def report(self) -> dict[str, Any]:
        """Return memory and activity of this process, see :func:`gkd.cluster.workers.activity.report_here`."""
        return report_here()


def _n_threads(config: Config, model_path: str, world: int, device: Device) -> int:
    """Return threads of a rank: its share of the node's cores, of which a small model uses one.

    On a GPU they are for an optimizer in the host's memory, which Ray's OMP_NUM_THREADS=1 would leave one.
    """
    n_cores = cores()
    if device == "cpu":
        n_threads = config.cluster.cpu_threads
        return n_threads or min(compute_threads([model_path]), max(1, n_cores // world))
    return max(1, n_cores // min(world, config.trainer.n_gpus_per_node))
