"""Weights over NCCL without gathering: vLLM's ``nccl_m2n``, by which all ranks of the actor send their FSDP shards.

One collective a tensor, of all ranks and all processes of engines, lays the ranks' shards out as the engines hold them:
as their own part of a parameter, or whole where vLLM fuses several of them. The group is met as that of
:mod:`gkd.weights.nccl` is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from gkd.config.transfer import Place
from gkd.weights.nccl import join_apart, make_unique_id, require_enabled
from gkd.weights.shards import Rendezvous, ShardSource, ShardTransfer

MOST_RANKS = 16
"""Parts that the library puts together to one whole tensor: MAX_SOURCE_SHARDS in vLLM's m2n_common."""


class NcclM2n(ShardTransfer):
    """Shards from all of the actor's GPUs to other GPUs."""

    gathers = False
    backend = "gkd_nccl_m2n"
    packages: ClassVar = {
        "nccl.m2n": "it comes with NVIDIA's nccl-extensions (https://github.com/NVIDIA/nccl-extensions), which needs "
        "NCCL 2.30.5 or newer, and VLLM_NCCL_SO_PATH naming the libnccl.so that it was built with",
    }

    @classmethod
    def new_address(cls) -> str:
        """Return an id of NCCL's, base64."""
        return make_unique_id("nccl_m2n")

    @classmethod
    def trainer(cls, rendezvous: Rendezvous, source: ShardSource, client: Any) -> Any:
        """Return vLLM's trainer engine of this rank in a new group. Raises ValueError for what it cannot send."""
        from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo, M2NTrainerWeightTransferEngine

        from gkd.weights.vllm_sources import Shards

        info = M2NTrainerInitInfo(
            rank=rendezvous.rank,
            world_size=rendezvous.n_ranks + rendezvous.n_receivers,
            num_trainer_ranks=rendezvous.n_ranks,
            dst_mesh_dims=(rendezvous.n_engines, rendezvous.span),
            nccl_unique_id_b64=rendezvous.address,
        )
        with join_apart():
            engine = M2NTrainerWeightTransferEngine.trainer_init(
                info, client=client, source=Shards(source, rendezvous.n_ranks)
            )
        require_enabled("nccl_m2n", engine.group)
        return engine

    @classmethod
    def find_obstacle(cls, actor: Sequence[Place], rollout: Sequence[Place]) -> str | None:
        """Return why not; None where all is well."""
        if len(actor) > MOST_RANKS:
            return f"the actor has {len(actor)} ranks, and it puts whole tensors together of {MOST_RANKS} parts at most"
        return super().find_obstacle(actor, rollout)
