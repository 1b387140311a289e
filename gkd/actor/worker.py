"""One rank of the actor: trains the student, hands out its weights, writes it to disk."""

from __future__ import annotations

import datetime
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gkd.actor.applied import Applied, Metrics
from gkd.actor.balance import pack
from gkd.actor.memory import is_out_of_memory, out_of_memory_text, smaller_budget
from gkd.actor.model import load, shard
from gkd.actor.optimizer import adamw, learning_rate, n_updates
from gkd.actor.pretrained import write_pretrained
from gkd.actor.publishing import Publisher
from gkd.actor.staging import Staging
from gkd.actor.state import Part, load_state, move, part_of, put_part
from gkd.cluster.failure import one_line
from gkd.cluster.fetch import fetch_samples, places_of
from gkd.config import Algorithm, Config, Loss
from gkd.durable import Sum
from gkd.errors import NotUpdated, OutOfMemory, RunFailed
from gkd.inference.engine import Device
from gkd.losses.micro_batch import collate
from gkd.losses.objective import logprobs, objective
from gkd.losses.targets import check_targets
from gkd.observability.memory import memory_here
from gkd.types import Lesson, Scored, seed_of
from gkd.weights.transfer import Piece

Places = dict[tuple[Any, int], Tensor]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Kept:
    """What a rank has: its part of weights and optimizer state, and the log-probabilities it remembers.

    ``applied`` is the step that the weights are of, None in the middle of one, of which ``rows`` are done.
    """

    part: Part
    old: Places
    reference: Places
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
        torch.set_num_threads(_n_threads(config, world, device))
        self._publisher = Publisher(config.weights, self.device, self._weights)
        self._budget = config.actor.max_tokens_per_micro_batch
        self._away = False  # whether the weights have left the GPU to others
        self._old: Places = {}
        self._reference: Places = {}
        self.staging = Staging(self.device)

    def open_store(self) -> tuple[str, int]:
        """On rank 0: open the rendezvous on a port this process chooses; returns host and port."""
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
            timeout=datetime.timedelta(seconds=self.config.trainer.update_timeout_s),
        )

    def load(self) -> int:
        """Read the student and shard it over the ranks. Returns its number of parameters."""
        torch.manual_seed(self.config.trainer.seed)
        actor = self.config.actor
        student = load(self.model_path, actor.gradient_checkpointing, actor.lora, self.device, self.dtype)
        self.n_parameters = sum(p.numel() for p in student.parameters())
        self.vocab_size = student.lm.config.get_text_config().vocab_size
        mesh = dist.device_mesh.init_device_mesh(self.device.type, (self.world,))
        shard(
            student, mesh, self.dtype, self.config.actor.offload_optimizer
        )  # moves it to the device, a layer at a time
        self.student, self.optimizer = student, adamw(student, self.config.actor)
        self.staging.set(Applied(0))
        return self.n_parameters

    def remember(self, lessons: Sequence[Lesson], old: bool, reference: bool) -> None:
        """Keep log-probabilities of these samples' tokens until the weights are published.

        ``old``: the present ones, which the batch's updates start from. ``reference``: those of the model without its
        adapter.
        """
        if old:
            self._old |= self._fitting(lessons, lambda: self._logprobs(lessons))
        if reference:
            from gkd.actor.lora import without_adapter

            with without_adapter(self.student.lm):
                self._reference |= self._fitting(lessons, lambda: self._logprobs(lessons))

    @torch.no_grad()
    def _logprobs(self, lessons: Sequence[Lesson]) -> Places:
        """Of every sample's response tokens, by the sample's place."""
        scored, found = self._fetch(lessons), {}
        for part in self._turns([lesson.record.n_tokens for lesson in lessons]):
            chosen = [scored[i] for i in part]
            micro = collate(chosen, None, [0.0] * len(part), [0.0] * len(part)).to(self.device)
            log_q = self.student(micro, logprobs(micro, self.config))
            pieces = log_q.cpu().split([len(s.sample.response_ids) for s in chosen])
            found.update({_place(lessons[i]): piece for i, piece in zip(part, pieces, strict=True)})
        return found

    def update(
        self, lessons: Sequence[Lesson], weights: Sequence[float], n_positions: int, step: int, final: bool = True
    ) -> Metrics:
        """One optimizer step on this rank's share of a batch of ``n_positions`` response tokens over all ranks.

        ``weights``: that of each token of each lesson in the batch's loss; ``final``: whether the training step has no
        further update. Returns the metrics of the whole batch.
        Raises NotUpdated on a gradient that is not finite and OutOfMemory as :meth:`_fitting`, with nothing changed.
        """
        algorithm = self.config.algorithm_on("cpu" if self.device.type == "cpu" else "cuda")
        metrics = self._fitting(lessons, lambda: self._accumulate(lessons, weights, n_positions, algorithm, train=True))
        norm = torch.nn.utils.clip_grad_norm_(self.student.parameters(), self.config.actor.grad_clip)
        grad_norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        if not math.isfinite(grad_norm):
            raise NotUpdated(f"the gradient of step {step} is not finite (norm {grad_norm}); nothing was updated")
        lr = learning_rate(self.config.actor, step - 1, self.config.trainer.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.staging.begin()
        try:
            self.optimizer.step()
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise RunFailed(
                    out_of_memory_text(self.config, self.world, None, self._budget, one_line(error))
                ) from None
            raise
        self.optimizer.zero_grad(set_to_none=True)  # their memory is of use to whoever works next
        row = {**metrics, "actor/grad_norm": grad_norm, "actor/lr": lr}
        self.staging.end(step, row, final)
        return row

    def evaluate(self, lessons: Sequence[Lesson], weights: Sequence[float], n_positions: int, loss: Loss) -> Metrics:
        """The distillation metrics of a batch without training on it; arguments as for :meth:`update`."""
        self.student.eval()
        try:
            with torch.no_grad():
                return self._fitting(
                    lessons, lambda: self._accumulate(lessons, weights, n_positions, Algorithm(loss=loss), train=False)
                )
        finally:
            self.student.train()

    def _fitting(self, lessons: Sequence[Lesson], run: Callable[[], Result]) -> Result:
        """``run``. Raises OutOfMemory when its micro-batches do not fit, with nothing changed.

        The process is then of no more use than to :meth:`keep` what it has for another one.
        """
        if self._away:
            raise RunFailed(f"actor rank {self.rank} was asked to compute while its weights had left the GPU to others")
        self.optimizer.zero_grad(set_to_none=True)
        # Dropout depends, as sampling does, on the place in the run alone, so that a run that goes on is exact.
        torch.manual_seed(seed_of(self.config.trainer.seed, n_updates(self.optimizer), self.rank))
        try:
            return run()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = one_line(error)
        # Only here is what the failed attempt held free: its frames are gone with the error. Handing on needs some.
        self.optimizer.zero_grad(set_to_none=True)
        lengths = [lesson.record.n_tokens for lesson in lessons]
        smaller = smaller_budget(self._budget, lengths, pack(lengths, self._budget))
        raise OutOfMemory(out_of_memory_text(self.config, self.world, max(lengths), self._budget, reason), smaller)

    def take_at_most(self, budget: int) -> None:
        """Give micro-batches at most so many tokens from now on, where several sequences would share one."""
        self._budget = budget

    def keep(self) -> Kept:
        """What a new process in place of this one needs; also while this rank waits in a collective."""
        part = part_of(self.optimizer, self.device, self.staging.updated)
        return Kept(part, self._old, self._reference, self.staging.applied, self.staging.rows)

    def take_over(self, kept: Kept) -> None:
        """Go on with what the process before this one had."""
        put_part(self.optimizer, kept.part)
        self._old, self._reference = kept.old, kept.reference
        self.staging.set(kept.applied, kept.rows)

    def _accumulate(
        self, lessons: Sequence[Lesson], weights: Sequence[float], n_positions: int, algorithm: Algorithm, train: bool
    ) -> Metrics:
        """Forward, and backward when training, over micro-batches; the metrics of the batch over all ranks."""
        scored = [
            s if (own := self._reference.get(_place(lesson))) is None else replace(s, reference=own.numpy())
            for s, lesson in zip(self._fetch(lessons), lessons, strict=True)
        ]
        # FSDP gathers on all ranks at once, so all take the same turns; and all report the same metrics.
        top_k = self._agree(max((s.target.ids.shape[1] for s in scored if s.target), default=0))
        old = [self._old.get(_place(lesson)) for lesson in lessons]
        remembered = bool(self._agree(int(any(values is not None for values in old)))) and train
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=self.device))
        largest: dict[str, Tensor] = {}
        for part in self._turns([lesson.record.n_tokens for lesson in lessons]):
            micro = collate(
                [scored[i] for i in part],
                top_k if algorithm.needs_teacher else None,
                [weights[i] for i in part],
                [lessons[i].advantage for i in part],
                [values for i in part if (values := old[i]) is not None] if remembered else None,
            )
            if micro.targets is not None:
                check_targets(self.vocab_size, micro.targets)
            micro = micro.to(self.device)
            evaluate = objective(micro, algorithm, self.config.rollout, self.config.actor.loss_chunk)
            total, found = self.student(micro, evaluate)
            if train:
                # FSDP averages gradients over ranks; the weights are those of the batch of all of them.
                (total * self.world).backward()
            for name, value in found.losses.items():
                sums[name] += value.detach()
            for name, values in found.sums.items():
                sums[name] += values.detach().sum() / n_positions
            for name, value in found.largest.items():
                largest[name] = torch.maximum(largest.get(name, value), value)
        return self._reduce(sums, largest)

    def _fetch(self, lessons: Sequence[Lesson]) -> list[Scored]:
        places = places_of([lesson.record for lesson in lessons])
        return fetch_samples(places, self.config.trainer.update_timeout_s)

    def _turns(self, lengths: Sequence[int]) -> list[list[int]]:
        """Micro-batches of this rank, as many as any rank has: the last of them may be empty."""
        parts = pack(lengths, self._budget)
        return parts + [[]] * (self._agree(len(parts)) - len(parts))

    def _agree(self, value: int) -> int:
        """The largest of all ranks' values. A collective."""
        known = torch.tensor(value, device=self.device)
        dist.all_reduce(known, dist.ReduceOp.MAX)
        return int(known)

    def _reduce(self, sums: dict[str, Tensor], largest: dict[str, Tensor]) -> Metrics:
        """Metrics of all ranks together. Every rank had at least one micro-batch, so all know the same names."""
        found: dict[str, float] = {}
        for values, operation in ((sums, dist.ReduceOp.SUM), (largest, dist.ReduceOp.MAX)):
            if values:
                names = sorted(values)
                stacked = torch.stack([values[n].double() for n in names])
                dist.all_reduce(stacked, operation)
                found.update(zip(names, stacked.tolist(), strict=True))
        return found

    def pack_piece(self, version: int, number: int, packs: bool) -> Piece:
        """Gather and pack the next piece of the weights, see :meth:`Publisher.pack`. A collective."""
        return self._publisher.pack(version, number, packs)

    def release_piece(self) -> None:
        """Free the last piece of a push, which every engine has loaded."""
        self._publisher.sender.release()

    def new_group(self) -> str:
        """On rank 0: the address of a new group for the weights."""
        return self._publisher.sender.new_group()

    def join_group(self, address: str, world: int) -> None:
        """On rank 0: join the engines' processes in a group of ``world`` ranks."""
        self._publisher.sender.join(address, world)

    def broadcast_piece(self) -> None:
        """On rank 0: send the packed piece to the group."""
        self._publisher.sender.broadcast()

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, gathered as they are consumed; forgets what was remembered of samples of earlier ones."""
        self._old.clear()
        self._reference.clear()
        return self.student.file_tensors(self.dtype)

    def save(self, directory: str) -> None:
        """Write the student and its tokenizer in Hugging Face format. A collective; rank 0 writes.

        An adapter is merged into it, and written by itself as well, in peft's format, to ``adapter``.
        """
        lora = self.config.actor.lora
        write_pretrained(self.student, self.model_path, lora, self.dtype, Path(directory), writes=self.rank == 0)
        dist.barrier()

    def applied(self) -> Applied | None:
        """The step that the weights are of; None in the middle of one."""
        return self.staging.applied

    def stage(self) -> Applied | None:
        """Copy weights and optimizer state for :meth:`write_staged`, on any thread, whatever this rank is doing.

        Returns the step that the copy is of; None, and nothing is copied, in the middle of one.
        """
        return self.staging.copy(self.optimizer)

    def write_staged(self, directory: str) -> tuple[str, Sum]:
        """Write what :meth:`stage` copied to a file in ``directory``, on any thread; returns its name and sum."""
        file = Path(directory, f"rank_{self.rank:05}.safetensors")
        return file.name, self.staging.write(self.student, self.optimizer, file)

    def load_state(self, files: Sequence[str], step: int) -> None:
        """Go on with what all ranks of some number wrote after ``step``."""
        load_state(self.student, self.optimizer, [Path(file) for file in files])
        self.staging.set(Applied(step))

    def give_back(self) -> None:
        """Move weights and optimizer state to the host, unless they live there."""
        self._move("cpu")
        self._away = True

    def take_back(self) -> None:
        """Move them back."""
        self._move(self.device)
        self._away = False

    def _move(self, device: Device | torch.device) -> None:
        if not self.config.actor.offload_optimizer:
            move(self.student, self.optimizer, torch.device(device))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def memory(self) -> dict[str, float]:
        """Memory of this rank."""
        return memory_here()


def _n_threads(config: Config, world: int, device: Device) -> int:
    """Threads of a rank: its share of the node's cores.

    On a GPU they are for an optimizer in the host's memory, which Ray's OMP_NUM_THREADS=1 would leave one.
    """
    cores = len(os.sched_getaffinity(0))
    if device == "cpu":
        return config.cluster.cpu_threads or max(1, cores // world)
    return max(1, cores // min(world, config.trainer.n_gpus_per_node))


def _place(lesson: Lesson) -> tuple[Any, int]:
    return lesson.record.ref, lesson.record.slot
