"""The driver's view of the actor: all its ranks as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gkd.actor.balance import share
from gkd.cluster.fetch import places_of
from gkd.cluster.group import Group
from gkd.config import Config, Loss
from gkd.sample import Record
from gkd.weights.object_store import Push


class ActorGroup:
    """Splits every batch over the ranks and has all of them act together."""

    def __init__(self, group: Group, config: Config) -> None:
        self.group, self.config, self.version = group, config, 0

    def load(self) -> int:
        """Have the ranks meet and read the student; returns its number of parameters."""
        limit = self.config.cluster.start_timeout_s
        host, port = self.group.only([0]).call("open_store", timeout_s=limit, what="opening the rendezvous")[0]
        self.group.call("join", host, port, timeout_s=limit, what="meeting the other ranks")
        found: list[int] = self.group.call("load", timeout_s=limit, what="loading the student")
        return found[0]

    def update(self, records: Sequence[Record], step: int) -> dict[str, float]:
        """One optimizer step; returns the metrics of the batch."""
        metrics = self._run("update", records, self.config.algorithm.loss, step)
        self.version += 1
        return metrics

    def evaluate(self, records: Sequence[Record]) -> dict[str, float]:
        """The batch's metrics under the current weights, at temperature 1, without training on it."""
        loss = self.config.algorithm.loss
        return self._run("evaluate", records, Loss(name="reverse_kl", top_k=loss.top_k, tail=True))

    def _run(self, method: str, records: Sequence[Record], *args: Any) -> dict[str, float]:
        shares = share([r.n_tokens for r in records], len(self.group.workers))
        n_positions = sum(r.n_response for r in records)
        found: list[dict[str, float]] = self.group.call_each(
            method,
            [(places_of([records[i] for i in part]), n_positions, *args) for part in shares],
            timeout_s=self.config.trainer.update_timeout_s,
        )
        return found[0]

    def publish(self) -> Push:
        """The current weights, ready to be fetched."""
        limit = self.config.weights.timeout_s
        push: Push = self.group.call("publish", timeout_s=limit)[0]
        return push

    def save(self, directory: str) -> None:
        """Write the student in Hugging Face format."""
        limit = self.config.trainer.update_timeout_s
        self.group.call("save", directory, timeout_s=limit, what="writing the student")
