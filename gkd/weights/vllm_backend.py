"""The receiving end inside vLLM: weights that arrive as tensors in this process.

The one file of the project that touches vLLM's weight-transfer API, which changes between releases. The backend
derives from vLLM's CUDA IPC engine for its layer-wise reload around an update and replaces how tensors arrive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import LLM
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


@dataclass
class TensorUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One piece of the weights, by Hugging Face names."""

    tensors: dict[str, Tensor]


class TensorTransferEngine(IPCWeightTransferEngine):  # type: ignore[misc]
    """Loads tensors handed over in the call itself."""

    update_info_cls = TensorUpdate

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one piece. The base class would synchronise an accelerator, which a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: TensorUpdate) -> None:
        """Hand the tensors to the model's own loader, which knows its fused and sharded layers."""
        self.model.load_weights([(name, t.to(self.device)) for name, t in update_info.tensors.items()])

    def finish_weight_update(self) -> None:
        """Finish the reload; on a CPU also repack a head tied to the embeddings, which the reload leaves as it was."""
        super().finish_weight_update()
        if self.device.type == "cpu" and self.model_config.hf_text_config.tie_word_embeddings:
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)


def load(llm: LLM, pieces: Iterable[dict[str, Tensor]], version: int) -> None:
    """Replace the weights of an idle engine by those in ``pieces`` and forget every cached prefix.

    Raises whatever a piece raises on its way, leaving the engine half-updated: do not sample from it then.
    """
    llm.start_weight_update()
    for piece in pieces:
        llm.update_weights({"update_info": {"tensors": piece}})
    llm.finish_weight_update(str(version))
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM did not reset its prefix cache after a weight update: blocks are still in use")
