"""The driver's view of the actor: all its ranks as one."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from gkd.actor.batches import AppliedUpdate, balance_over_ranks, combine_mini_batches
from gkd.algorithms.aggregation import Totals, chunk_weights, token_weights
from gkd.cluster.workers.colocation import Colocation
from gkd.cluster.workers.environment import environment
from gkd.cluster.workers.group import Group, PendingCall, gather, is_any_done, is_done, wait
from gkd.config import Algorithm, Config, Loss
from gkd.errors import OutOfMemory, RunFailed
from gkd.types import TrainingSample

log = logging.getLogger("gkd")

ANSWERS_S = 30.0
"""Time that a rank which is not hung takes to report which step its weights are of."""
WHOLE_S = 10.0
"""Time that ranks have to come to the end of an optimizer step, and all of them to the same."""


class ActorGroup:
    """Splits every batch over the ranks and has all of them act together.

    ``restart`` ends the ranks' processes, whatever they wait for, and returns new ones in their place.
    """

    def __init__(
        self,
        group: Group,
        config: Config,
        model_path: str,
        restart: Callable[[], Group],
        colocation: Colocation | None = None,
    ) -> None:
        self.group, self.config, self.model_path, self.version = group, config, model_path, 0
        self._restart, self.colocation = restart, colocation or Colocation()
        self._loaded = False
        self._budget = self._budget_warned_of = config.actor.max_tokens_per_micro_batch
        self.meanwhile: Callable[[Sequence[Any]], None] | None = None
        """What is to be done while ranks compute, until one of these references is there; None: nothing."""
        self.beside: Callable[[], None] | None = None
        """What is to be done once, as soon as ranks compute; None: nothing."""
        self._chunks: list[list[TrainingSample]] = []  # of the step that is being accumulated
        self._accumulating: list[PendingCall] = []
        self._writing: PendingCall | None = None  # files of a checkpoint, by the present processes

    def submit_build(self) -> PendingCall:
        """Start building every rank, without a model yet."""
        world, device = len(self.group), self.group.reports[0].device
        args = [(self.config, self.model_path, rank, world, device) for rank in range(world)]
        variables = environment(device, [self.model_path], self.config.cluster.cpu_threads)
        variables.pop("TORCHDYNAMO_DISABLE", None)  # which is for engines; here actor.compile decides
        return self.group.submit_build("gkd.actor.worker:ActorWorker", args, environment=variables)

    def load(self) -> int:
        """Have the ranks meet and read the student; returns its number of parameters."""
        self.colocation.onload_actor()
        limit = self.config.cluster.start_timeout_s
        host, port = self.group.select([0]).call("open_store", timeout_s=limit, activity="opening the rendezvous")[0]
        self.group.call("join", host, port, timeout_s=limit, activity="meeting the other ranks")
        n_parameters: list[int] = self.group.call("load", timeout_s=limit, activity="loading the student")
        self._loaded = True
        return n_parameters[0]

    def fits(self, lengths: Sequence[int]) -> bool:
        """Return whether the ranks hold sequences of ``lengths`` tokens in one micro-batch each."""
        if sum(lengths) <= self._budget:
            return True
        shares = balance_over_ranks(lengths, len(self.group))
        return all(sum(lengths[i] for i in part) <= self._budget for part in shares if len(part) > 1)

    def accumulate(self, chunks: Sequence[Sequence[TrainingSample]]) -> None:
        """Start adding the gradients of the next chunks of a batch, for :meth:`apply`; returns at once.

        The order of the chunks, and what is in each, decide how sums are rounded; how many of them come at a time does
        not.
        """
        first = len(self._chunks)
        self._chunks += map(list, chunks)
        self._accumulating += self._submit_chunks(first)

    @property
    def accumulates(self) -> bool:
        """Whether ranks are at work on chunks, behind which any other call waits."""
        return not all(map(is_done, self._accumulating))

    def _submit_chunks(self, first: int) -> list[PendingCall]:
        """Submit all chunks from number ``first`` on, in one call of each rank: between two calls a rank is idle."""
        chunks = self._chunks[first:]
        parts = [self._weighted_shares(chunk) for chunk in chunks]
        activity = f"accumulating chunks {first + 1} to {len(self._chunks)} of a batch"
        calls = []
        if self._is_own_reference:
            calls += [
                self.group.submit_each(
                    "trainer.compute_logprobs", [(samples, False, True) for samples, _ in shares], activity=activity
                )
                for shares in parts
            ]
        by_rank = [(list(shares), first) for shares in zip(*parts, strict=True)]
        calls.append(self.group.submit_each("trainer.accumulate_chunks", by_rank, activity=activity))
        return calls

    def _weighted_shares(self, chunk: Sequence[TrainingSample]) -> list[tuple[list[TrainingSample], list[float]]]:
        """Return each rank's samples of a chunk, and their weights."""
        lengths, in_loss = [sample.n_sampled for sample in chunk], [sample.in_loss for sample in chunk]
        limit = self.config.rollout.max_response_length
        weights = chunk_weights(lengths, in_loss, self.config.algorithm.aggregation, limit)
        return [([chunk[i] for i in share], [weights[i] for i in share]) for share in self._shares(chunk)]

    def apply(self, step: int) -> dict[str, float]:
        """Do one optimizer step on the chunks given to :meth:`accumulate`; returns the metrics of all together.

        With ``timing_s/update``, the seconds that the ranks computed for it, which began before this was called.
        """
        try:
            chunks = self.wait_for_chunks()
            batch = [sample for chunk in self._chunks for sample in chunk]
        finally:
            self._chunks, self._accumulating = [], []
        lengths, in_loss = [sample.n_sampled for sample in batch], [sample.in_loss for sample in batch]
        computed = sum(max(seconds or 0.0 for seconds in ranks) for ranks in chunks)
        totals = Totals.from_lengths(lengths, in_loss, self.config.algorithm.aggregation)
        began = time.monotonic()
        row: dict[str, float] = self._gather(
            [self.group.submit("trainer.apply", totals, step, activity=f"update {step}")]
        )[0][0]
        self.version = step
        self._warn_of_memory(step)
        return {**row, "timing_s/update": computed + time.monotonic() - began}

    def wait_for_chunks(self) -> list[list[Any]]:
        """Wait until everything given to :meth:`accumulate` is accumulated; returns what the calls for it returned."""
        while self._accumulating:
            try:
                return self._gather(self._accumulating)
            except OutOfMemory as failure:
                self._shrink(failure)
        return []

    @property
    def _is_own_reference(self) -> bool:
        """Whether the reference is the actor without its adapter."""
        return self.config.algorithm.kl.coef > 0 and not self.config.has_reference_group

    def update(self, samples: Sequence[TrainingSample], step: int) -> dict[str, float]:
        """Train on a batch: ``actor.epochs`` times over its mini-batches, one optimizer step each.

        Returns the metrics of all mini-batches together.
        """
        settings = self.config.actor
        size = settings.mini_batch_size or len(samples)
        parts = [samples[i : i + size] for i in range(0, len(samples), size)]
        # Later updates' ratios are against the weights that the first one starts from; the data's answers have none.
        old = settings.epochs * len(parts) > 1 and not self.config.algorithm.is_supervised
        reference = self._is_own_reference
        for part in parts if old or reference else []:
            shares = self._shares(part)
            self._call("trainer.compute_logprobs", [([part[i] for i in share], old, reference) for share in shares])
        parts *= settings.epochs
        rows = [self._run("trainer.update", part, step, i == len(parts)) for i, part in enumerate(parts, 1)]
        self.version = step
        self._warn_of_memory(step)
        return combine_mini_batches(rows)

    def _warn_of_memory(self, step: int) -> None:
        if self._budget < self._budget_warned_of:
            log.warning(
                "step %d: memory ran out and the update was done again in micro-batches of at most %d tokens, with the "
                "same gradient; actor.max_tokens_per_micro_batch=%d from the start would save the time",
                step, self._budget, self._budget,
            )  # fmt: skip
            self._budget_warned_of = self._budget

    def evaluate(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        """Measure distillation of a batch under the current weights, at temperature 1, without training on it.

        What was given to :meth:`accumulate` is accumulated first.
        """
        return self._run("trainer.evaluate", samples, Algorithm(loss=Loss(name="reverse_kl", tail=True)))

    def cross_entropy(self, samples: Sequence[TrainingSample]) -> float:
        """Return the cross-entropy of a batch under the current weights, nats, aggregated as the loss of training."""
        return self._run("trainer.evaluate", samples, Algorithm(name="sft"))["actor/supervised_loss"]

    def _run(self, method: str, samples: Sequence[TrainingSample], *further: Any) -> dict[str, float]:
        """Call ``method`` of every rank with its share of a batch; returns the metrics of the whole."""
        self.wait_for_chunks()  # a rank whose memory ran out in them would keep the others waiting
        lengths = [sample.n_sampled for sample in samples]
        in_loss = [sample.in_loss for sample in samples]
        limit = self.config.rollout.max_response_length
        weights = token_weights(lengths, in_loss, self.config.algorithm.aggregation, limit)
        args = [
            ([samples[i] for i in share], [weights[i] for i in share], sum(lengths), *further)
            for share in self._shares(samples)
        ]
        metrics: dict[str, float] = self._call(method, args)[0]
        return metrics

    def _shares(self, samples: Sequence[TrainingSample]) -> list[list[int]]:
        return balance_over_ranks([sample.n_tokens for sample in samples], len(self.group))

    def _call(self, method: str, args: Sequence[Sequence[Any]]) -> list[Any]:
        """Call ``method`` of every rank; where memory runs out, again in smaller micro-batches, from now on.

        Raises OutOfMemory, with nothing changed and all ranks at hand, when one sequence alone is too much.
        """
        self.colocation.onload_actor()
        while True:
            try:
                return self._gather([self.group.submit_each(method, args)])[0]
            except OutOfMemory as failure:
                self._shrink(failure)
                self.wait_for_chunks()

    def _gather(self, calls: Sequence[PendingCall]) -> list[list[Any]]:
        """Wait for calls, which the ranks answer one after the other, within trainer.update_timeout_s for all."""
        deadline = time.monotonic() + self.config.trainer.update_timeout_s
        beside, self.beside = self.beside, None
        if beside is not None:
            beside()
            del beside  # what it holds
        for call in calls:
            # The first rank that is done, or has failed, is enough: the others are with it or wait for it.
            while self.meanwhile is not None and not is_any_done(call) and time.monotonic() < deadline:
                self.meanwhile(call.refs)
        return gather(calls, max(0.0, deadline - time.monotonic()))

    def _shrink(self, failure: OutOfMemory) -> None:
        """Start the ranks again with smaller micro-batches, in which they accumulate a step's chunks again.

        Raises ``failure`` where one sequence alone is too much.
        """
        self._budget = failure.budget or self._budget
        self._start_again()
        self.group.call("trainer.set_token_budget", self._budget, timeout_s=self.config.trainer.update_timeout_s)
        if failure.budget is None:
            raise failure
        if self._chunks:
            self._accumulating = self._submit_chunks(0)

    def _start_again(self) -> None:
        """Start new processes in place of all ranks, which go on with weights and optimizer state of the old ones.

        Where one rank ran out of memory the others wait for it in a collective, and only their end gets them out of it;
        FSDP in that rank takes itself to be within a pass that never ends; and its memory is in pieces.
        """
        text = "memory ran out on one of the actor's GPUs; its processes are started again"
        log.warning(text, extra={"kind": "restart"})
        limit = self.config.cluster.start_timeout_s
        if self._writing is not None:  # a checkpoint, which would end with them
            with suppress(RunFailed):  # late, which is known to those who wait for it
                wait(self._writing, self.config.trainer.save_timeout_s)
        kept = self.group.submit_control("state.keep", activity="handing on what the ranks have")
        wait(kept, limit)
        self.group = self._restart()
        gather([self.submit_build()], limit)
        self.load()
        self.group.call_each("state.take_over", [[ref] for ref in kept.refs], timeout_s=limit)

    def offload(self) -> None:
        """Have all ranks move what they hold to the host."""
        self.group.call("state.offload", timeout_s=self.config.weights.timeout_s, activity="offloading the actor")

    def onload(self) -> None:
        """Have all ranks move it back to their GPUs."""
        if self._loaded:
            self.group.call("state.onload", timeout_s=self.config.weights.timeout_s, activity="onloading the actor")

    @property
    def dtype(self) -> str:
        """What the ranks compute in."""
        return self.config.model.dtype_on(self.group.reports[0].device)

    def is_responding(self) -> bool:
        """Return whether every rank that is alive answers."""
        try:
            self.group.control("state.read_applied", timeout_s=ANSWERS_S, activity="answering", keep_deaths=True)
        except RunFailed:
            return False
        return True

    def read_applied(self) -> AppliedUpdate:
        """Return the step that the weights of all ranks are of, whatever these are doing.

        Raises RunFailed when one does not answer, or they are in the middle of a step for longer than an optimizer step
        takes.
        """
        return self._call_in_one_step("state.read_applied", ANSWERS_S, "reporting which step it is at")

    def stage(self) -> AppliedUpdate:
        """Have every rank copy its weights and optimizer state, for :meth:`write_staged`; returns their step.

        Raises what :meth:`read_applied` raises.
        """
        self.read_applied()  # a rank that is hung is found out here
        return self._call_in_one_step("state.stage", self.config.trainer.save_timeout_s, "copying a checkpoint")

    def _call_in_one_step(self, method: str, timeout_s: float, activity: str) -> AppliedUpdate:
        end = math.inf  # counts from the first answer: a copy may take longer than an optimizer step
        while True:
            results: list[AppliedUpdate | None] = self.group.control(method, timeout_s=timeout_s, activity=activity)
            if results[0] is not None and all(
                applied is not None and applied.step == results[0].step for applied in results
            ):
                return results[0]
            end = min(end, time.monotonic() + WHOLE_S)
            if time.monotonic() >= end:
                raise RunFailed("the actor is in the middle of an update")
            time.sleep(0.2)

    def write_staged(self, directory: str) -> PendingCall:
        """Start writing what :meth:`stage` copied; each rank returns the name and the sum of its file."""
        self._writing = self.group.submit_control("state.write_staged", directory, activity=f"writing {directory}")
        return self._writing

    def load_state(self, files: Sequence[str], step: int) -> None:
        """Go on with what the ranks wrote after ``step``, in whatever number they were."""
        self.colocation.onload_actor()
        limit = self.config.trainer.save_timeout_s
        self.group.call("state.load", files, step, timeout_s=limit, activity="reading the checkpoint")
        self.version = step

    def save(self, directory: str) -> None:
        """Write the student in Hugging Face format."""
        self.wait_for_chunks()
        self.colocation.onload_actor()
        limit = self.config.trainer.save_timeout_s
        self.group.call("state.save", directory, timeout_s=limit, activity="writing the student")
