"""Weights that engines fetch: vLLM's ``sharded_rdt``, each of whose processes reads by RDMA the slices that it keeps.

Every rank of the actor gathers a layer at a time and shares it with a further process of vLLM's beside it, an actor of
Ray's that serves it over NIXL until all engines have read it. So nobody is sent what another one keeps, and one layer,
two at most, are whole at a time. Engines' processes are actors of Ray's as well, as vLLM requires.
"""

from __future__ import annotations

from typing import Any, ClassVar

from gkd.config.device import PushLoad
from gkd.weights.shards import Rendezvous, ShardSource, ShardTransfer


class ShardedRdt(ShardTransfer):
    """Slices of layers, fetched from all of the actor's ranks by engines on other GPUs."""

    expandable_segments = False
    ray_executor = True
    backend = "sharded_rdt"
    packages: ClassVar = {"nixl._api": "pip install nixl"}

    @classmethod
    def count_sent_bytes(cls, push: PushLoad) -> float:
        """Return the bytes of what is read and of the layer that is gathered meanwhile, without vLLM's own buffers."""
        return max(push.layer, push.root) + push.layer

    @classmethod
    def trainer(cls, rendezvous: Rendezvous, source: ShardSource, client: Any) -> Any:
        """Return vLLM's trainer engine of this rank, its server started. Raises ValueError where that cannot be."""
        import ray
        from vllm.distributed.weight_transfer.sharded_rdt_trainer import (
            ShardedRDTTrainerInitInfo,
            ShardedRDTTrainerWeightTransferEngine,
        )

        from gkd.weights.vllm_sources import GatheredTensors

        info = ShardedRDTTrainerInitInfo(
            rank=rendezvous.rank,
            num_consumers=rendezvous.n_receivers,
            workers_per_replica=rendezvous.span,
            trainer_actor_namespace=ray.get_runtime_context().namespace,
            stall_timeout_s=rendezvous.limit_s,
        )
        return ShardedRDTTrainerWeightTransferEngine.trainer_init(info, client=client, source=GatheredTensors(source))
