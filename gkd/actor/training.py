"""One rank's part in training: log-probabilities, gradients of micro-batches, optimizer steps."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gkd.actor.batches import Metrics, measure_lengths, pack
from gkd.actor.collate import collate
from gkd.actor.compiling import compile_setting
from gkd.actor.copies import Copies
from gkd.actor.memory import is_out_of_memory, out_of_memory_text, shrink_budget
from gkd.actor.mismatch import compute_means, leave_out, mark_stale_tokens, split_by_age
from gkd.actor.model import Student
from gkd.actor.optimizer import learning_rate, n_updates, take_local
from gkd.actor.staging import Staging
from gkd.actor.sums import MetricSums, describe_not_finite
from gkd.algorithms.aggregation import Totals
from gkd.cluster.workers.activity import record_activity
from gkd.cluster.workers.group import fetch_samples
from gkd.config import Algorithm, Config
from gkd.config.actor import has_room
from gkd.errors import OutOfMemory, RunFailed, UpdateFailed, one_line
from gkd.losses.objective import logprobs, objective
from gkd.losses.targets import check_targets, send
from gkd.modeling.compiling import is_compile_failure
from gkd.types import ScoredSample, TrainingSample, seed_of

LogprobsByPlace = dict[tuple[Any, int], Tensor]
"""Log-probabilities [N] of samples' tokens, by :attr:`gkd.types.TrainingSample.place`."""
ChunkResult = TypeVar("ChunkResult")


class RankTrainer:
    """Trains ``student`` together with the other ranks; every public method is a collective of all ``world``.

    ``staging`` is kept up to date on which step the weights are of.
    """

    def __init__(
        self,
        student: Student,
        optimizer: torch.optim.Optimizer,
        staging: Staging,
        config: Config,
        rank: int,
        world: int,
        device: torch.device,
        copies: Copies | None = None,
    ) -> None:
        self.student, self.optimizer, self.staging, self.config = student, optimizer, staging, config
        self.rank, self.world, self.device, self.copies = rank, world, device, copies
        self.budget = config.actor.micro_batch_tokens
        """Tokens of a micro-batch, where several sequences share one."""
        self.is_offloaded = False
        """Whether the weights have left the GPU to others."""
        self.old: LogprobsByPlace = {}
        """Under the weights before the batch's first update."""
        self.reference: LogprobsByPlace = {}
        """Under the model without its adapter."""
        self.start_version = 0
        """Of the weights that the present step starts from."""
        self._sums: MetricSums | None = None  # of the chunks since the last update
        self._failed: OutOfMemory | None = None
        self._n_updates: int | None = None  # of the optimizer, which may have the number on the GPU; None: to be read
        self.shares_prompts = config.actor.share_prompts and student.can_share_prompts(device)
        self._vocab_size: int = student.lm.config.get_text_config().vocab_size

    @property
    def version(self) -> int:
        """Of the weights that are there, which an update starts from."""
        return self.start_version if self.staging.applied is None else self.staging.applied.step

    @record_activity("log-probabilities", lambda trainer, *_, **__: trainer.version)
    def compute_logprobs(self, samples: Sequence[TrainingSample], old: bool, reference: bool) -> float:
        """Compute log-probabilities of these samples' tokens and keep them until :meth:`forget_logprobs`.

        ``old``: under the present weights, which the batch's updates start from. ``reference``: under the model without
        its adapter. Returns the seconds that it took.
        """
        started = time.monotonic()
        if old:
            self.old |= self._run_fitting(samples, lambda: self._logprobs(samples))
        if reference:
            from gkd.actor.lora import disable_adapter

            with disable_adapter(self.student.lm):
                self.reference |= self._run_fitting(samples, lambda: self._logprobs(samples))
        return time.monotonic() - started

    def set_token_budget(self, budget: int) -> None:
        """Give micro-batches at most so many tokens from now on, where several sequences would share one."""
        self.budget = budget
        if self.student.compilation is not None:
            self.student.compilation.budget = budget

    def reread_optimizer(self) -> None:
        """Note that the optimizer has another state: that of a checkpoint, or of the process before this one."""
        self._n_updates = None

    def forget_logprobs(self) -> None:
        """Drop the log-probabilities that were kept: the weights are now others."""
        self.old.clear()
        self.reference.clear()

    @record_activity("update", lambda trainer, *_, **__: trainer.version)
    def update(
        self,
        samples: Sequence[TrainingSample],
        weights: Sequence[float],
        n_positions: int,
        step: int,
        final: bool = True,
    ) -> Metrics:
        """Do one optimizer step on this rank's share of a batch of ``n_positions`` sampled tokens over all ranks.

        ``weights``: that of each token of each sample in the batch's loss; ``final``: whether the training step has no
        further update. Returns the metrics of the whole batch.
        Raises UpdateFailed on a gradient that is not finite and OutOfMemory as :meth:`_run_fitting`, nothing changed.
        """
        self.accumulate(samples, weights, n_positions)
        return self.apply(Totals(), step, final)

    @record_activity("update", lambda trainer, *_, **__: trainer.version)
    def accumulate(
        self, samples: Sequence[TrainingSample], weights: Sequence[float], n_positions: int = 1, chunk: int = 0
    ) -> None:
        """Add the gradient of this rank's share of a chunk to that of the chunks before it, for :meth:`apply`.

        A GPU may still be at work on it when this returns.

        ``weights`` may lack a factor that is the same for all tokens of the batch, and metrics a division by its
        ``n_positions``: :class:`Totals` then has them. ``chunk``: number in the step; 0 forgets what was accumulated.
        Raises OutOfMemory as :meth:`_run_fitting`, with nothing changed; then also for all further chunks.
        """
        self.start_version = self.version
        if chunk == 0:
            self._sums = self._failed = None
            self.optimizer.zero_grad(set_to_none=True)
        elif self._failed is not None:
            raise self._failed
        if self._sums is None and chunk:
            raise RunFailed(f"actor rank {self.rank} was given chunk {chunk} of a step without those before it")
        try:
            sums = self._run_fitting(
                samples, lambda: self._accumulate(samples, weights, n_positions, self._algorithm, train=True), chunk
            )
        except OutOfMemory as error:
            self._failed = error
            raise
        self._sums = sums if self._sums is None else self._sums + sums

    @record_activity("update", lambda trainer, *_, **__: trainer.version)
    def accumulate_chunks(
        self, chunks: Sequence[tuple[Sequence[TrainingSample], Sequence[float]]], first: int
    ) -> float:
        """Do :meth:`accumulate` for chunks, samples and weights of each, that are numbered from ``first`` on.

        Returns the seconds that it took, to the end of what a GPU does for it.
        """
        started = time.monotonic()
        for number, (samples, weights) in enumerate(chunks, start=first):
            self.accumulate(samples, weights, chunk=number)
        self._synchronize()
        return time.monotonic() - started

    @record_activity("update", lambda trainer, *_, **__: trainer.version)
    def apply(self, totals: Totals, step: int, final: bool = True) -> Metrics:
        """Do one optimizer step on what was accumulated, which ``totals`` make the gradient of the whole batch.

        ``final``: whether the training step has no further update. Returns the metrics of the whole batch.
        Raises UpdateFailed on a gradient that is not finite, with nothing changed.
        """
        sums, self._sums = self._sums, None
        if sums is None:
            raise RunFailed(f"actor rank {self.rank} was to update without a gradient")
        if self.copies is not None:
            self.copies.sum_gradients(self.student.parameters())
        if totals.scale != 1.0:
            gradients = [p.grad for p in self.student.parameters() if p.grad is not None]
            torch._foreach_mul_([take_local(g) for g in gradients], totals.scale)
        metrics = compute_means(self._reduce(sums.scale(totals)))
        norm = torch.nn.utils.clip_grad_norm_(self.student.parameters(), self.config.actor.grad_clip)
        grad_norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        if not math.isfinite(grad_norm):
            raise UpdateFailed(describe_not_finite(step, grad_norm, metrics, len(self.staging.rows)))
        lr = learning_rate(self.config.actor, step - 1, self.config.trainer.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.staging.begin()
        try:
            self.optimizer.step()
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise RunFailed(out_of_memory_text(self.config, None, self.budget, one_line(error))) from None
            raise
        self._n_updates = None if self._n_updates is None else self._n_updates + 1
        self.optimizer.zero_grad(set_to_none=True)  # their memory is of use to the next on this GPU
        row = {**metrics, "actor/grad_norm": grad_norm, "actor/lr": lr}
        self.staging.end(step, row, final)
        if final:
            self._synchronize()
        return row

    def _synchronize(self) -> None:
        """Wait for a GPU, so that what it is at work on counts as this activity."""
        if self.device.type != "cpu":
            torch.cuda.current_stream(self.device).synchronize()

    @property
    def _algorithm(self) -> Algorithm:
        return self.config.algorithm_on("cpu" if self.device.type == "cpu" else "cuda")

    @record_activity("validate", lambda trainer, *_, **__: trainer.version)
    def evaluate(
        self, samples: Sequence[TrainingSample], weights: Sequence[float], n_positions: int, algorithm: Algorithm
    ) -> Metrics:
        """Return the metrics of ``algorithm`` on a batch without training on it; arguments as for :meth:`update`.

        Between two chunks of a step it leaves what was accumulated as it is.
        """
        with self._compute_without_gradient():
            run = partial(self._accumulate, samples, weights, n_positions, algorithm, train=False)
            return self._reduce(self._run_fitting(samples, run))

    @contextmanager
    def _compute_without_gradient(self) -> Iterator[None]:
        """Compute without a gradient or dropout, between passes with them: what these accumulated stays."""
        self.student.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.student.train()
        if isinstance(self.student, FSDPModule):
            self.student.reshard()  # without a backward pass it stays whole, and gradients are of its shards

    def _logprobs(self, samples: Sequence[TrainingSample]) -> LogprobsByPlace:
        """Return log-probabilities of every sample's sampled tokens."""
        scored, by_place = fetch_samples(samples, self.config.trainer.update_timeout_s), {}
        parts, shared = self._pack(samples), self.shares_prompts
        (n_parts,) = self._agree(len(parts))  # as many as any rank has
        for part in [*parts, *[[]] * (n_parts - len(parts))]:
            zeros = [0.0] * len(part)
            micro = collate([scored[i] for i in part], None, zeros, zeros, shared=shared).to(self.device)
            with self._compute_without_gradient():
                log_q = self.student(micro, logprobs(micro, self.config, self._is_roomy))
            pieces = log_q.cpu().split([samples[i].n_sampled for i in part])
            by_place.update({samples[i].place: piece for i, piece in zip(part, pieces, strict=True)})
        return by_place

    def _run_fitting(
        self, samples: Sequence[TrainingSample], run: Callable[[], ChunkResult], chunk: int = 0
    ) -> ChunkResult:
        """Do ``run``. Raises OutOfMemory when its micro-batches do not fit; what was accumulated is then forgotten.

        The process that ran out of memory is of no more use than to hand what else it has to another one.
        """
        if self.is_offloaded:
            raise RunFailed(f"actor rank {self.rank} was to compute while its weights had left the GPU to others")
        if self._n_updates is None:
            self._n_updates = n_updates(self.optimizer)
        _seed(dropout_seed(self.config.trainer.seed, self._n_updates, self.rank, chunk), self.device)
        try:
            with self.student.use_compute_type():
                return run()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                if is_compile_failure(error):
                    raise RunFailed(compile_setting(self.config.actor.compile).failure_text(error)) from None
                raise
            reason = one_line(error)
        # Only here is what the failed attempt held free: its frames are gone with the error. Handing on needs some.
        self.optimizer.zero_grad(set_to_none=True)
        lengths = measure_lengths(samples, self.shares_prompts)
        smaller = shrink_budget(self.budget, lengths, padded=self.student.takes_rows)
        longest = max((sample.n_tokens for sample in samples), default=0)
        raise OutOfMemory(out_of_memory_text(self.config, longest, self.budget, reason), smaller)

    def _accumulate(
        self,
        samples: Sequence[TrainingSample],
        weights: Sequence[float],
        n_positions: int,
        algorithm: Algorithm,
        train: bool,
    ) -> MetricSums:
        """Run forward, and backward when training, over micro-batches; returns this rank's part of the metrics.

        Nothing here waits for the GPU, so that a micro-batch is laid out while the one before it is computed.
        """
        scored = self._with_reference(samples)
        old = [self.old.get(sample.place) for sample in samples]
        parts = self._pack(samples)
        widest = max((s.teacher.ids.shape[1] for s in scored if s.teacher), default=0)
        # FSDP gathers on all ranks at once, so all do as many passes; and all report the same metrics.
        n_parts, top_k, any_old = self._agree(len(parts), widest, int(any(values is not None for values in old)))
        has_old = bool(any_old) and train
        has_moved = train and not has_old and bool(self.staging.rows)  # from what the engines have, by earlier updates
        losses, sums = (defaultdict[str, Tensor](self._make_zero) for _ in range(2))
        largest: dict[str, Tensor] = {}
        for part in [*parts, *[[]] * (n_parts - len(parts))]:
            micro = collate(
                [scored[i] for i in part],
                top_k if algorithm.needs_teacher else None,
                [weights[i] for i in part],
                [samples[i].advantage for i in part],
                [values for i in part if (values := old[i]) is not None] if has_old else None,
                self.shares_prompts,
            )
            if micro.targets is not None:
                check_targets(self._vocab_size, micro.targets)
            micro = micro.to(self.device)
            evaluate = objective(micro, algorithm, self.config.rollout, self.config.actor.loss_chunk, self._is_roomy)
            total, measured = self.student(micro, evaluate)
            if train:
                # FSDP averages gradients over a copy's ranks; the weights are those of the batch of all of them.
                (total * (self.world // (self.copies.n if self.copies else 1))).backward()
            by_token, most = measured.sums, measured.largest
            if has_moved:
                by_token, most = leave_out(by_token), leave_out(most)
            elif self.config.schedule.max_staleness and train:
                stale = send(mark_stale_tokens([samples[i] for i in part], self.start_version), self.device)
                by_token, most = split_by_age(by_token, most, stale)
            for name, value in measured.losses.items():
                losses[name] += value.detach()
            for name, values in by_token.items():
                sums[name] += values.detach().sum() / n_positions
            for name, value in most.items():
                largest[name] = torch.maximum(largest.get(name, value), value)
        return MetricSums(dict(losses), dict(sums), largest)

    @property
    def _is_roomy(self) -> bool:
        """Whether there is memory to spare, as long as there was enough."""
        return has_room(self.budget)

    def _make_zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def _with_reference(self, samples: Sequence[TrainingSample]) -> list[ScoredSample]:
        """Return the samples' arrays, with the reference's log-probabilities where they are kept here."""
        scored = fetch_samples(samples, self.config.trainer.update_timeout_s)
        references = [self.reference.get(sample.place) for sample in samples]
        return [
            s if ref is None else replace(s, reference=ref.numpy()) for s, ref in zip(scored, references, strict=True)
        ]

    def _pack(self, samples: Sequence[TrainingSample]) -> list[list[int]]:
        lengths = measure_lengths(samples, self.shares_prompts)
        return pack(lengths, self.budget, padded=self.student.takes_rows)

    def _agree(self, *values: int) -> list[int]:
        """Return the largest of all ranks' values, each by itself; among the hosts, as what is known there already."""
        if self.world == 1:
            return list(values)
        largest = torch.tensor(values)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        agreed: list[int] = largest.tolist()
        return agreed

    def _reduce(self, sums: MetricSums) -> Metrics:
        """Return metrics of all ranks together. Every rank had at least one micro-batch, so all have the same names."""
        metrics: dict[str, float] = {}
        added = {**sums.losses, **sums.sums}
        for values, operation in ((added, dist.ReduceOp.SUM), (sums.largest, dist.ReduceOp.MAX)):
            if values:
                names = sorted(values)
                stacked = torch.stack([values[n].double() for n in names])
                if self.world > 1:  # a collective of one wakes another thread
                    dist.all_reduce(stacked, operation)
                metrics.update(zip(names, stacked.tolist(), strict=True))
        return metrics


def dropout_seed(seed: int, n_updates: int, rank: int, chunk: int) -> int:
    """Return what dropout draws from in a rank's ``chunk`` after ``n_updates`` optimizer steps of a run with ``seed``.

    It depends, as sampling does, on the place in the run alone, so that a run that goes on is exact.
    """
    return seed_of(seed, n_updates, rank, *([chunk] if chunk else []))


def _seed(seed: int, device: torch.device) -> None:
    """Seed what dropout draws from. ``torch.manual_seed`` notes a traceback for each kind of GPU that is not there."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
