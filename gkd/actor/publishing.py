"""The weights of one rank of the actor on their way to the engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gkd.actor.model import Student
from gkd.actor.shards import StudentShards
from gkd.actor.training import RankTrainer
from gkd.cluster.workers.activity import record_activity
from gkd.config import Weights
from gkd.weights.delivery import Delivery, Destination, Push
from gkd.weights.publishing import Publisher
from gkd.weights.shard_publishing import ShardPublisher


class WeightSource:
    """Sends the weights of the student of ``trainer``, which is there once the student is, in ``dtype``.

    ``span``: processes of each engine.
    """

    def __init__(self, settings: Weights, device: torch.device, dtype: torch.dtype, span: int = 1) -> None:
        self._dtype, self._adapter_only = dtype, settings.adapter_only
        self.trainer: RankTrainer | None = None
        self.publisher: Publisher | ShardPublisher
        if settings.transfer_class.shards:
            self.publisher = ShardPublisher(settings, StudentShards(self._begin, dtype), span)
        else:
            self.publisher = Publisher(settings, device, self._tensors)

    @record_activity("send weights", lambda _, push, *__: push.version)
    def send(self, push: Push, destinations: Sequence[Destination]) -> dict[int, int]:
        """Send the weights to the engines that this rank sends to, see :meth:`Publisher.send`. A collective.

        Returns the versions that these serve then; engines that died or failed are not among them.
        """
        delivery = Delivery(push, destinations)
        self.publisher.send(delivery)
        return delivery.served

    def new_group(self) -> str:
        """Return the address of a new group for the weights. On rank 0."""
        assert isinstance(self.publisher, Publisher), "ranks that send shards meet by themselves"
        return self.publisher.sender.new_group()

    def join_group(self, address: str, world: int) -> None:
        """Join the engines' processes in a group of ``world`` ranks. On rank 0."""
        assert isinstance(self.publisher, Publisher), "ranks that send shards meet by themselves"
        self.publisher.sender.join(address, world)

    def _begin(self) -> Student:
        """Return the student, whose weights are about to be read; log-probabilities under earlier ones are dropped."""
        assert self.trainer is not None, "weights are sent after the student is loaded"
        self.trainer.forget_logprobs()
        return self.trainer.student

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Return the weights, gathered as they are iterated. With weights.adapter_only, the adapter's."""
        student = self._begin()
        return student.adapter_file_tensors(self._dtype) if self._adapter_only else student.file_tensors(self._dtype)
