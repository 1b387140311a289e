"""The weights of one rank of the actor, sent by a trainer engine of vLLM's (:mod:`gkd.weights.shards`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gkd.config import Weights
from gkd.errors import RunFailed
from gkd.weights.delivery import Delivery
from gkd.weights.shards import Rendezvous, ShardSource, ShardTransfer


class ShardPublisher:
    """Keeps vLLM's trainer engine for as long as pushes go to the same engines, of ``span`` processes each.

    :meth:`send` is called on all ranks alike; rank 0 alone has destinations, and makes the calls.
    """

    def __init__(self, settings: Weights, source: ShardSource, span: int) -> None:
        self.settings, self._source, self._span = settings, source, span
        self._transfer: type[ShardTransfer] = settings.transfer_class
        self._workers: list[Any] = []  # that the engine is connected to, on rank 0
        self._engine: Any = None

    def send(self, delivery: Delivery) -> None:
        """Send the current weights. A collective. Raises RunFailed where an engine did not take them."""
        rendezvous, engines = self._rendezvous(delivery)
        if rendezvous is None:
            self._engine.client.begin(delivery)
        else:
            self._connect(rendezvous, engines, delivery)
        self._engine.send_weights()

    def _rendezvous(self, delivery: Delivery) -> tuple[Rendezvous | None, tuple[int, ...]]:
        """Return whom to meet, and the engines' ranks; None where all are met. Rank 0 broadcasts it."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if ranks > 1 else 0
        notice: list[Any] = [None]
        if rank == 0 and self._workers != (workers := [to.worker for to in delivery.destinations]):
            self._workers = workers
            notice = [(self._transfer.new_address(), tuple(to.engine for to in delivery.destinations))]
        if ranks > 1:
            dist.broadcast_object_list(notice, src=0, device=torch.device("cpu"))
        if notice[0] is None:
            return None, ()
        address, engines = notice[0]
        return Rendezvous(rank, ranks, len(engines), self._span, address, self.settings.timeout_s), engines

    def _connect(self, rendezvous: Rendezvous, engines: tuple[int, ...], delivery: Delivery) -> None:
        from gkd.weights.vllm_sources import DeliveryClient

        if self._engine is not None:
            self._engine.shutdown()
        client = DeliveryClient(delivery, engines)
        try:
            self._engine = self._transfer.trainer(rendezvous, self._source, client)
        except (ValueError, ImportError) as error:  # before anybody is met
            raise RunFailed(f"weights.transfer={self.settings.transfer}: {error}") from None
