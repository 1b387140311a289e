"""One rank of the actor: trains the student, hands out its weights, writes it to disk."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from gkd.actor.batches import Applied, Metrics
from gkd.actor.compiling import Compilation, compile_layers, use_liger
from gkd.actor.loading import load_sharded
from gkd.actor.optimizer import adamw
from gkd.actor.pretrained import write_pretrained
from gkd.actor.staging import Staging
from gkd.actor.state import Part, load_state, move, part_of, put_part
from gkd.actor.training import LogprobsByPlace, RankTrainer
from gkd.algorithms.aggregation import Totals
from gkd.cluster.workers.activity import noted, report_here
from gkd.config import Algorithm, Config
from gkd.durable import Sum
from gkd.inference.engine import Device
from gkd.inference.vllm_environment import compute_threads
from gkd.types import TrainingSample
from gkd.weights.delivery import Delivery, Destination, Push
from gkd.weights.publishing import Publisher


@dataclass(frozen=True, slots=True)
class Kept:
    """What a rank has: its part of weights and optimizer state, and the log-probabilities that it keeps.

    ``applied`` is the step that the weights are of, None in the middle of one, of which ``rows`` are done.
    """

    part: Part
    old: LogprobsByPlace
    reference: LogprobsByPlace
    applied: Applied | None
    rows: tuple[Metrics, ...]


class ActorWorker:
    """The student on one GPU (or on CPU cores), one of ``world`` ranks.

    Built without a model; :meth:`open_store` on rank 0, then :meth:`join` and :meth:`load` on all.
    """

    def __init__(self, config: Config, model_path: str, rank: int, world: int, device: Device) -> None:
        self.config, self.model_path, self.rank, self.world = config, model_path, rank, world
        self.device = torch.device(device)
        self.dtype = getattr(torch, config.model.dtype_on(device))
        torch.set_num_threads(_n_threads(config, model_path, world, device))
        self._publisher = Publisher(config.weights, self.device, self._weights)
        self.staging = Staging(self.device)

    def open_store(self) -> tuple[str, int]:
        """Open the rendezvous, on rank 0, on a port this process chooses; returns host and port."""
        host = ray.util.get_node_ip_address()
        self.store = dist.TCPStore(host, 0, self.world, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return host, self.store.port

    def join(self, host: str, port: int) -> None:
        """Meet the other ranks. Raises RunFailed when they do not come within cluster.start_timeout_s."""
        limit = datetime.timedelta(seconds=self.config.cluster.start_timeout_s)
        if self.rank:
            self.store = dist.TCPStore(host, port, self.world, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            store=self.store,
            rank=self.rank,
            world_size=self.world,
            # Ranks wait for each other while rank 0 reads the model as well; the driver has a limit for each of both.
            timeout=datetime.timedelta(
                seconds=max(self.config.trainer.update_timeout_s, self.config.cluster.start_timeout_s)
            ),
        )

    def load(self) -> int:
        """Read the student and shard it over the ranks. Returns its number of parameters."""
        torch.manual_seed(self.config.trainer.seed)
        actor = self.config.actor
        mesh = dist.device_mesh.init_device_mesh(self.device.type, (self.world,))
        student = load_sharded(
            self.model_path, mesh, self.device, self.dtype,
            actor.gradient_checkpointing, actor.lora, actor.offload_optimizer, self._fuse,
        )  # fmt: skip
        self.n_parameters = sum(p.numel() for p in student.parameters())
        self.student, self.optimizer = student, adamw(student, self.config.actor)
        self.trainer = RankTrainer(
            student, self.optimizer, self.staging, self.config, self.rank, self.world, self.device
        )
        self.staging.set(Applied(0))
        return self.n_parameters

    def _fuse(self, lm: PreTrainedModel, packed: bool) -> Compilation | None:
        """Have layers, which are not sharded yet, run as fewer kernels: ``actor.compile`` and ``actor.liger``."""
        actor = self.config.actor
        if actor.liger:
            use_liger(lm, self.device)
            return None
        return compile_layers(lm, actor.compile, actor.max_tokens_per_micro_batch, self.device, packed)

    @noted("log-probabilities")
    def compute_logprobs(self, samples: Sequence[TrainingSample], old: bool, reference: bool) -> None:
        """Compute and keep log-probabilities; as :meth:`gkd.actor.training.RankTrainer.compute_logprobs`."""
        self.trainer.compute_logprobs(samples, old, reference)

    @noted("update")
    def update(
        self,
        samples: Sequence[TrainingSample],
        weights: Sequence[float],
        n_positions: int,
        step: int,
        final: bool = True,
    ) -> Metrics:
        """Do one optimizer step; as :meth:`gkd.actor.training.RankTrainer.update`."""
        return self.trainer.update(samples, weights, n_positions, step, final)

    @noted("update")
    def accumulate(
        self, samples: Sequence[TrainingSample], weights: Sequence[float], n_positions: int = 1, chunk: int = 0
    ) -> float:
        """Add a chunk's gradient; as :meth:`gkd.actor.training.RankTrainer.accumulate`."""
        return self.trainer.accumulate(samples, weights, n_positions, chunk)

    @noted("update")
    def apply(self, totals: Totals, step: int) -> Metrics:
        """Do one optimizer step on the chunks; as :meth:`gkd.actor.training.RankTrainer.apply`."""
        return self.trainer.apply(totals, step)

    @noted("validate")
    def evaluate(
        self, samples: Sequence[TrainingSample], weights: Sequence[float], n_positions: int, algorithm: Algorithm
    ) -> Metrics:
        """Return the metrics of ``algorithm``; as :meth:`gkd.actor.training.RankTrainer.evaluate`."""
        return self.trainer.evaluate(samples, weights, n_positions, algorithm)

    def take_at_most(self, budget: int) -> None:
        """Give micro-batches at most so many tokens from now on, where several sequences would share one."""
        self.trainer.budget = budget
        if self.student.compilation is not None:
            self.student.compilation.budget = budget

    def keep(self) -> Kept:
        """Return what a new process in place of this one needs; also while this rank waits in a collective."""
        part = part_of(self.optimizer, self.device, self.staging.updated)
        return Kept(part, self.trainer.old, self.trainer.reference, self.staging.applied, self.staging.rows)

    def take_over(self, kept: Kept) -> None:
        """Go on with what the process before this one had."""
        put_part(self.optimizer, kept.part)
        self.trainer.old, self.trainer.reference = kept.old, kept.reference
        self.staging.set(kept.applied, kept.rows)

    @noted("send weights")
    def send_weights(self, push: Push, destinations: Sequence[Destination]) -> dict[int, int]:
        """Send the weights to the engines that this rank sends to, see :meth:`Publisher.send`. A collective.

        Returns the versions that these serve then; engines that died or failed are not among them.
        """
        delivery = Delivery(push, destinations)
        self._publisher.send(delivery)
        return delivery.served

    def new_group(self) -> str:
        """Return the address of a new group for the weights. On rank 0."""
        return self._publisher.sender.new_group()

    def join_group(self, address: str, world: int) -> None:
        """Join the engines' processes in a group of ``world`` ranks. On rank 0."""
        self._publisher.sender.join(address, world)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return the weights, gathered as they are iterated; log-probabilities under earlier ones are dropped.

        With weights.adapter_only, the adapter's.
        """
        self.trainer.forget_logprobs()
        if self.config.weights.adapter_only:
            return self.student.adapter_file_tensors(self.dtype)
        return self.student.file_tensors(self.dtype)

    @noted("save")
    def save(self, directory: str) -> None:
        """Write the student and its tokenizer in Hugging Face format. A collective; rank 0 writes.

        An adapter is merged into it, and written by itself as well, in peft's format, to ``adapter``.
        """
        lora = self.config.actor.lora
        write_pretrained(self.student, self.model_path, lora, self.dtype, Path(directory), writes=self.rank == 0)
        dist.barrier()

    def applied(self) -> Applied | None:
        """Return the step that the weights are of; None in the middle of one."""
        return self.staging.applied

    def stage(self) -> Applied | None:
        """Copy weights and optimizer state for :meth:`write_staged`, on any thread, whatever this rank is doing.

        Returns the step that the copy is of; None, and nothing is copied, in the middle of one.
        """
        return self.staging.copy(self.optimizer)

    def write_staged(self, directory: str) -> tuple[str, Sum]:
        """Write what :meth:`stage` copied to a file in ``directory``, on any thread; returns its name and sum."""
        file = Path(directory, f"rank_{self.rank:05}.safetensors")
        return file.name, self.staging.write(self.optimizer, file)

    def load_state(self, files: Sequence[str], step: int) -> None:
        """Go on with what all ranks of some number wrote after ``step``."""
        load_state(self.student, self.optimizer, [Path(file) for file in files])
        self.staging.set(Applied(step))

    @noted("offload")
    def offload(self) -> None:
        """Move weights and optimizer state to the host, unless they live there."""
        self._move("cpu")
        self.trainer.is_offloaded = True

    @noted("onload")
    def onload(self) -> None:
        """Move them back."""
        self._move(self.device)
        self.trainer.is_offloaded = False

    def _move(self, device: Device | torch.device) -> None:
        if not self.config.actor.offload_optimizer:
            move(self.student, self.optimizer, torch.device(device))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def report(self) -> dict[str, Any]:
        """Return memory and activity of this process, see :func:`gkd.cluster.workers.activity.report_here`."""
        return report_here()


def _n_threads(config: Config, model_path: str, world: int, device: Device) -> int:
    """Return threads of a rank: its share of the node's cores, of which a small model uses one.

    On a GPU they are for an optimizer in the host's memory, which Ray's OMP_NUM_THREADS=1 would leave one.
    """
    cores = len(os.sched_getaffinity(0))
    if device == "cpu":
        wanted = config.cluster.cpu_threads
        return wanted or min(compute_threads([model_path]), max(1, cores // world))
    return max(1, cores // min(world, config.trainer.n_gpus_per_node))
