"""The engines' end of ``weights.transfer=nccl_m2n``: vLLM's backend, for several engines that are on their own."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.m2n_engine import (
    M2NWeightTransferEngine,
    M2NWeightTransferInitInfo,
    M2NWeightTransferUpdateInfo,
)

from gkd.weights.vllm_reload import Reload


@dataclass(kw_only=True)
class EngineInfo(M2NWeightTransferInitInfo):  # type: ignore[misc]
    """vLLM's, and which of how many engines this one is."""

    replica_rank: int = 0
    num_replicas: int = 1


class M2NTransferEngine(Reload, M2NWeightTransferEngine):  # type: ignore[misc]
    """vLLM's, with what its reload lacks.

    It takes engines to be replicas of one deployment, numbered by ``data_parallel_index``; here each is its own.
    """

    init_info_cls = EngineInfo

    def init_transfer_engine(self, init_info: EngineInfo) -> None:
        """Join a new group; leaves an earlier one."""
        self.shutdown()
        self.parallel_config: Any = copy.copy(self.vllm_config.parallel_config)
        self.parallel_config.data_parallel_index = init_info.replica_rank
        super().init_transfer_engine(init_info)

    def receive_weights(self, update_info: M2NWeightTransferUpdateInfo) -> None:
        """Take part in the transfer of each tensor."""
        with self.load_meanwhile():
            super().receive_weights(update_info)
