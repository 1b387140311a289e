"""The driver's view of the actor: all its ranks as one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from gkd.actor.balance import share
from gkd.algorithms.aggregation import token_weights
from gkd.cluster.group import Group
from gkd.config import Config, Loss
from gkd.errors import NotUpdated
from gkd.sample import Lesson, Record
from gkd.weights.object_store import Push

log = logging.getLogger("gkd")


class ActorGroup:
    """Splits every batch over the ranks and has all of them act together."""

    def __init__(self, group: Group, config: Config) -> None:
        self.group, self.config, self.version = group, config, 0
        self.settled = True
        """Whether the weights are those of a whole step."""
        self._budget = float(config.actor.max_tokens_per_micro_batch)

    def load(self) -> int:
        """Have the ranks meet and read the student; returns its number of parameters."""
        limit = self.config.cluster.start_timeout_s
        host, port = self.group.only([0]).call("open_store", timeout_s=limit, what="opening the rendezvous")[0]
        self.group.call("join", host, port, timeout_s=limit, what="meeting the other ranks")
        found: list[int] = self.group.call("load", timeout_s=limit, what="loading the student")
        return found[0]

    def update(self, lessons: Sequence[Lesson], step: int) -> dict[str, float]:
        """Learn from a batch: ``actor.update_epochs`` times over its mini-batches, one optimizer step each.

        Returns the mean of the mini-batches' metrics.
        """
        settings = self.config.actor
        size = settings.mini_batch_size or len(lessons)
        parts = [lessons[i : i + size] for i in range(0, len(lessons), size)]
        # The ratios of later updates are against the weights that the first one starts from.
        old = settings.update_epochs * len(parts) > 1
        reference = self.config.algorithm.kl.coef > 0 and not self.config.asks_reference
        for part in parts if old or reference else []:
            shares = self._shares(part)
            self._call("remember", [([part[i] for i in share], old, reference) for share in shares])
        rows: list[dict[str, float]] = []
        self.settled = False
        try:
            for part in parts * settings.update_epochs:
                row = self._run("update", part, step)
                rows.append(row)
        except NotUpdated:
            self.settled = not rows
            raise
        self.version += 1
        self._tell_of_memory(rows[-1].pop("actor/micro_batch_tokens"), step)
        return {name: sum(row[name] for row in rows) / len(rows) for name in rows[-1]}

    def _tell_of_memory(self, budget: float, step: int) -> None:
        if budget < self._budget:
            log.warning(
                "step %d: memory ran out and the update was done again in micro-batches of at most %d tokens, with the "
                "same gradient; actor.max_tokens_per_micro_batch=%d from the start would save the time",
                step, budget, budget,
            )  # fmt: skip
            self._budget = budget

    def evaluate(self, records: Sequence[Record]) -> dict[str, float]:
        """Distillation metrics of a batch under the current weights, at temperature 1, without training on it."""
        loss = Loss(name="reverse_kl", top_k=self.config.algorithm.loss.top_k, tail=True)
        return self._run("evaluate", [Lesson(record) for record in records], loss)

    def _run(self, method: str, lessons: Sequence[Lesson], last: Any) -> dict[str, float]:
        """Call ``method`` of every rank with its share of a batch; returns the metrics of the whole."""
        lengths = [lesson.record.n_response for lesson in lessons]
        kept = [lesson.kept for lesson in lessons]
        limit = self.config.rollout.max_response_length
        weights = token_weights(lengths, kept, self.config.algorithm.aggregation, limit)
        args = [
            ([lessons[i] for i in share], [weights[i] for i in share], sum(lengths), last)
            for share in self._shares(lessons)
        ]
        found: dict[str, float] = self._call(method, args)[0]
        return found

    def _shares(self, lessons: Sequence[Lesson]) -> list[list[int]]:
        return share([lesson.record.n_tokens for lesson in lessons], len(self.group))

    def _call(self, method: str, args: Sequence[Sequence[Any]]) -> list[Any]:
        return self.group.call_each(method, args, timeout_s=self.config.trainer.update_timeout_s)

    def publish(self) -> Push:
        """The current weights, ready to be fetched."""
        limit = self.config.weights.timeout_s
        push: Push = self.group.call("publish", self.version, timeout_s=limit)[0]
        self.settled = True
        return push

    def save_state(self, directory: str) -> None:
        """Write weights and optimizer state to go on from."""
        limit = self.config.trainer.save_timeout_s
        self.group.call("save_state", directory, timeout_s=limit, what="writing a checkpoint")

    def load_state(self, directory: str, version: int) -> None:
        """Go on from what :meth:`save_state` wrote, with ``version`` as that of the weights."""
        limit = self.config.trainer.save_timeout_s
        self.group.call("load_state", directory, timeout_s=limit, what="reading the checkpoint")
        self.version = version

    def save(self, directory: str) -> None:
        """Write the student in Hugging Face format."""
        limit = self.config.trainer.save_timeout_s
        self.group.call("save", directory, timeout_s=limit, what="writing the student")
