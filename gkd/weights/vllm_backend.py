"""The receiving end inside vLLM: one backend for each way that weights arrive.

The one file of the project that touches the engines' side of vLLM's weight-transfer API, which changes between
releases; :mod:`gkd.weights.nccl` has the actor's. The backends derive from vLLM's CUDA IPC engine for its layer-wise
reload around an update and replace how tensors arrive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import LLM
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_common import (
    NCCLWeightTransferInitInfo,
    worker_init_payload,
    worker_init_process_group,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from gkd.weights import ipc, nccl
from gkd.weights.pieces import Piece, unpack
from gkd.weights.vllm_direct import DirectCopies


@dataclass
class TensorUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One piece of the weights, by Hugging Face names."""

    tensors: dict[str, Tensor]


class TensorTransferEngine(IPCWeightTransferEngine):  # type: ignore[misc]
    """Loads tensors handed over in the call itself."""

    update_info_cls = TensorUpdate
    direct: DirectCopies | None = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one piece. The base class would synchronise an accelerator, which a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: TensorUpdate) -> None:
        """Hand the tensors to the model's own loader, which knows its fused and sharded layers."""
        assert self.direct is not None, "a piece came before the update was begun"
        with self.direct:
            self.model.load_weights([(name, t.to(self.device)) for name, t in update_info.tensors.items()])
        self.direct.process(whole=False)

    def start_weight_update(self) -> None:
        """Begin the reload; on a CPU every layer is then prepared for its kernels as at the first load.

        vLLM prepares experts for its CPU kernels (padding, packing) only while they have no kernel yet, and a reload
        would leave raw weights where packed ones are read. No graph holds on to a kernel here, as it would on a GPU.
        """
        if self.device.type == "cpu":
            for module in self.model.modules():
                if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                    module.quant_method.moe_kernel = None
        super().start_weight_update()
        self.direct = DirectCopies(self.model)

    def finish_weight_update(self) -> None:
        """Finish the reload; on a CPU also prepare layers whose weights came by way of another module, as tied heads.

        Such a layer shares its weight with the one that was reloaded, and has a copy of its own in its kernel's layout.
        """
        assert self.direct is not None, "an update ends that was not begun"
        self.direct.process(whole=True)
        self.direct = None
        super().finish_weight_update()
        if self.device.type == "cpu":
            modules = list(self.model.modules())
            owners = Counter(id(p) for module in modules for p in module._parameters.values() if p is not None)
            for module in modules:
                shared = any(owners[id(p)] > 1 for p in module._parameters.values() if p is not None)
                if shared and isinstance(quant_method := getattr(module, "quant_method", None), QuantizeMethodBase):
                    quant_method.process_weights_after_loading(module)


@dataclass
class PieceUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The layout of one packed piece, whose bytes come another way."""

    piece: Piece


class IpcEngine(TensorTransferEngine):
    """Copies what the actor rank on the same GPU has packed."""

    update_info_cls = PieceUpdate

    def receive_weights(self, update_info: PieceUpdate) -> None:
        """Get the bytes, check them, and load the tensors in them."""
        piece = update_info.piece
        super().receive_weights(TensorUpdate(unpack(piece, self.fetch(piece))))

    def fetch(self, piece: Piece) -> Tensor:
        """The bytes of a piece."""
        return ipc.receive(piece, self.device)


class NcclEngine(IpcEngine):
    """Takes part in the broadcasts of actor rank 0."""

    init_info_cls = NCCLWeightTransferInitInfo
    group: Any = None

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Meet the actor and the other engines' workers, who do the same at the same time."""
        self.group = nccl.enabled(worker_init_process_group(init_info, self.parallel_config))

    def fetch(self, piece: Piece) -> Tensor:
        """The bytes of a piece."""
        return nccl.receive(piece, self.group, self.device)

    def shutdown(self) -> None:
        """Leave the group."""
        super().shutdown()
        if self.group is not None:
            self.group.destroy()
            self.group = None


def load(llm: LLM, pieces: Iterable[dict[str, Tensor]], version: int) -> None:
    """Replace the weights of an idle engine by those in ``pieces`` and forget every cached prefix.

    Raises whatever a piece raises on its way, leaving the engine half-updated: do not sample from it then.
    """
    llm.start_weight_update()
    for piece in pieces:
        llm.update_weights({"update_info": {"tensors": piece}})
    finish(llm, version)


def join(llm: LLM, unique_id: str, offset: int, world: int) -> None:
    """Have the engine's workers be ranks ``offset`` and following of a new NCCL group, and leave an earlier one."""
    llm.shutdown_weight_transfer_engine()
    joining = NCCLWeightTransferInitInfo(rank_offset=offset, world_size=world, nccl_unique_id_b64=unique_id)
    llm.init_weight_transfer_engine({"init_info": worker_init_payload(joining)})


def take(llm: LLM, piece: Piece) -> None:
    """Load one packed piece into an idle engine, in order; :func:`finish` follows the last. Raises as :func:`load`."""
    if piece.number == 0:
        llm.start_weight_update()
    llm.update_weights({"update_info": {"piece": piece}})


def finish(llm: LLM, version: int) -> None:
    """End an update: the engine serves ``version`` and has forgotten every cached prefix."""
    llm.finish_weight_update(str(version))
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM did not reset its prefix cache after a weight update: blocks are still in use")
