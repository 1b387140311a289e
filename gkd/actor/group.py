"""The driver's view of the actor: all its ranks as one, which train on batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from gkd.actor.batches import balance_over_ranks, combine_mini_batches, fits_in_pack, measure_lengths
from gkd.actor.ranks import ANSWERS_S, ActorRanks
from gkd.algorithms.aggregation import Totals, chunk_weights, token_weights
from gkd.cluster.workers.colocation import Colocation
from gkd.cluster.workers.deadline import Deadline
from gkd.cluster.workers.group import Attend, Group, PendingCall, gather_partners, is_any_done, is_done, read_outcome
from gkd.config import Algorithm, Config, Loss
from gkd.errors import OutOfMemory
from gkd.types import TrainingSample

log = logging.getLogger("gkd")


class ActorGroup(ActorRanks):
    """Splits every batch over the ranks, in micro-batches that fit: smaller ones where memory runs out."""

    def __init__(
        self,
        group: Group,
        config: Config,
        model_path: str,
        restart: Callable[[], Group],
        colocation: Colocation | None = None,
    ) -> None:
        super().__init__(group, config, model_path, restart, colocation)
        self._budget = self._budget_warned_of = config.actor.micro_batch_tokens
        self.shares_prompts = config.actor.share_prompts
        """Whether the ranks compute a prompt once for its samples."""
        self.meanwhile: Attend | None = None
        """What is to be done while ranks compute, until one of these references is there; None: nothing."""
        self.beside: Callable[[], None] | None = None
        """What is to be done once, as soon as ranks compute; None: nothing."""
        self._chunks: list[list[TrainingSample]] = []  # of the step that is being accumulated
        self._accumulating: list[PendingCall] = []
        self._n_accumulated = 0  # calls at the head of these that are done, which need no further look

    def read_sharing(self) -> None:
        """Note whether the ranks, which have loaded the student, can share prompts: not where they pad sequences."""
        activity = "reporting whether prompts are shared"
        self.shares_prompts = all(self.group.control("state.shares_prompts", timeout_s=ANSWERS_S, activity=activity))

    def fits(self, samples: Sequence[TrainingSample]) -> bool:
        """Return whether the ranks hold these samples in one micro-batch each."""
        n_tokens, n_ranks = [sample.n_tokens for sample in samples], len(self.group)
        total = sum(n_tokens)
        # Longest first leaves no rank more than the mean of all and one sequence (Graham, 1969): mostly that is enough.
        if total <= self._budget or total + n_ranks * max(n_tokens) <= n_ranks * self._budget:
            return True
        lengths = measure_lengths(samples, self.shares_prompts)
        shares = balance_over_ranks(lengths, n_ranks)
        return all(fits_in_pack(share, lengths, self._budget) for share in shares)

    def accumulate(self, chunks: Sequence[Sequence[TrainingSample]]) -> None:
        """Start adding the gradients of the next chunks of a batch, for :meth:`apply`; returns at once.

        The order of the chunks, and what is in each, decide how sums are rounded; how many of them come at a time does
        not.
        """
        self.recover_chunks()
        first = len(self._chunks)
        self._chunks += map(list, chunks)
        self._accumulating += self._submit_chunks(first)

    @property
    def accumulates(self) -> bool:
        """Whether ranks are at work on chunks, behind which any other call waits."""
        return not all(map(is_done, self._accumulating[self._n_accumulated :]))

    def recover_chunks(self) -> None:
        """Begin all chunks again, smaller ones, where a rank's memory has run out in one. Raises what else failed.

        The others may wait for that rank in the middle of a layer, and never answer.
        """
        for number, call in enumerate(self._accumulating[self._n_accumulated :], self._n_accumulated):
            outcome = read_outcome(call)
            if outcome is False:
                try:
                    self._gather([call])
                except OutOfMemory as failure:
                    self._shrink(failure)
                return
            self._n_accumulated += outcome is True and number == self._n_accumulated

    def _submit_chunks(self, first: int) -> list[PendingCall]:
        """Submit all chunks from number ``first`` on, in one call of each rank: between two calls a rank is idle."""
        chunks = self._chunks[first:]
        parts = [self._weigh_shares(chunk, chunk_weights) for chunk in chunks]
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

    def _weigh_shares(
        self, samples: Sequence[TrainingSample], weigh: Callable[..., list[float]]
    ) -> list[tuple[list[TrainingSample], list[float]]]:
        """Return each rank's share of ``samples``, and what :mod:`gkd.algorithms.aggregation` weighs their tokens."""
        lengths, in_loss = [sample.n_sampled for sample in samples], [sample.in_loss for sample in samples]
        weights = weigh(lengths, in_loss, self.config.algorithm.aggregation, self.config.rollout.max_response_length)
        return [([samples[i] for i in share], [weights[i] for i in share]) for share in self._shares(samples)]

    def apply(self, step: int) -> dict[str, float]:
        """Do one optimizer step on the chunks given to :meth:`accumulate`; returns the metrics of all together.

        With ``timing_s/update``, the seconds that the ranks computed for it, which began before this was called.
        """
        try:
            chunks = self.wait_for_chunks()
            batch = [sample for chunk in self._chunks for sample in chunk]
        finally:
            self._chunks, self._accumulating, self._n_accumulated = [], [], 0
        lengths, in_loss = [sample.n_sampled for sample in batch], [sample.in_loss for sample in batch]
        computed = sum(map(max, chunks))  # also of the log-probabilities before them
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
        return self.config.algorithm.needs_reference and not self.config.has_reference_group

    def update(self, samples: Sequence[TrainingSample], step: int) -> dict[str, float]:
        """Train on a batch: ``actor.epochs`` times over its mini-batches, one optimizer step each.

        Returns the metrics of all mini-batches together.
        """
        settings = self.config.actor
        size = settings.mini_batch_size or len(samples)
        parts = [samples[i : i + size] for i in range(0, len(samples), size)]
        # Ratios of later updates are against the weights that the first one starts from.
        old = settings.epochs * len(parts) > 1 and self.config.algorithm.weighs_samples
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
        """Return the cross-entropy of a batch's answers under the current weights: nats, the mean over their tokens."""
        return self._run("trainer.evaluate", samples, Algorithm(name="sft"))["actor/cross_entropy"]

    def _run(self, method: str, samples: Sequence[TrainingSample], *further: Any) -> dict[str, float]:
        """Call ``method`` of every rank with its share of a batch; returns the metrics of the whole."""
        self.wait_for_chunks()  # a rank whose memory ran out in them would keep the others waiting
        n_positions = sum(sample.n_sampled for sample in samples)
        args = [(*share, n_positions, *further) for share in self._weigh_shares(samples, token_weights)]
        metrics: dict[str, float] = self._call(method, args)[0]
        return metrics

    def _shares(self, samples: Sequence[TrainingSample]) -> list[list[int]]:
        return balance_over_ranks(measure_lengths(samples, self.shares_prompts), len(self.group))

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
        """Wait for calls, which the ranks answer one after the other, as long as they begin micro-batches.

        Raises RunFailed where no rank has begun one for ``trainer.update_timeout_s``.
        """
        limit = self.config.trainer.update_timeout_s
        deadline = Deadline(limit, self.measure_idle, "trainer.update_timeout_s")
        beside, self.beside = self.beside, None
        if beside is not None:
            beside()
            del beside  # what it holds
        for call in calls:
            # The first rank that is done, or has failed, is enough: the others are with it or wait for it.
            while self.meanwhile is not None and not is_any_done(call) and not deadline.is_over():
                self.meanwhile(call.refs)
        return gather_partners(calls, deadline)

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
            self._accumulating, self._n_accumulated = self._submit_chunks(0), 0

    def save(self, directory: str, attend: Attend | None = None) -> None:
        """Write the student in Hugging Face format, once what was given to :meth:`accumulate` is accumulated.

        ``attend`` as of :meth:`ActorRanks.save`.
        """
        self.wait_for_chunks()
        super().save(directory, attend)
