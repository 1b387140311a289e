"""The receiving end inside vLLM: a backend that loads pieces of weights, whichever transfer brings them.

The one file of the project that touches the engines' side of vLLM's weight-transfer API, which changes between
releases; :mod:`gkd.weights.nccl` has the actor's. The backend derives from vLLM's CUDA IPC engine for its layer-wise
reload around an update and replaces how tensors arrive.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from vllm import LLM
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from gkd.config import Weights
from gkd.weights.transfer import Piece, Receiver
from gkd.weights.vllm_direct import DirectCopies

Running = Literal["none", "recompute", "keep"]
"""What becomes of what unfinished requests have cached when weights change; none: there are none."""


@dataclass
class ReceiverInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The section ``weights`` of the configuration, for a transfer between GPUs; and the group that its receivers join.

    Without ``address`` there is no group. The engine's processes have the ranks from ``offset`` on, of ``world``.
    """

    weights: dict[str, Any]
    address: str | None = None
    offset: int = 0
    world: int = 0


@dataclass
class PieceUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One piece: its tensors, by the names of the model's files, or what the receiver needs to get them."""

    tensors: dict[str, Tensor] | None = None
    piece: Piece | None = None


class PieceTransferEngine(IPCWeightTransferEngine):  # type: ignore[misc]
    """Loads tensors handed over in the call itself, or received by this process from a GPU."""

    init_info_cls = ReceiverInfo
    update_info_cls = PieceUpdate
    direct: DirectCopies | None = None
    receiver: Receiver | None = None

    def init_transfer_engine(self, init_info: ReceiverInfo) -> None:
        """Build the receiver of a transfer between GPUs, once, and have it join the group."""
        if self.receiver is None:
            weights = Weights.model_validate(init_info.weights)
            self.receiver = weights.transfer_class.receiver(weights, self.device)
        if init_info.address is not None:
            parallel = self.parallel_config
            rank = init_info.offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
            self.receiver.join(init_info.address, rank, init_info.world)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one piece. The base class would synchronise an accelerator, which a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: PieceUpdate) -> None:
        """Hand the tensors to the model's own loader, which knows its fused and sharded layers."""
        assert self.direct is not None, "a piece came before the update was begun"
        tensors = update_info.tensors
        if tensors is None:
            assert self.receiver is not None and update_info.piece is not None
            tensors = self.receiver.receive(update_info.piece)
        with self.direct:
            self.model.load_weights([(name, t.to(self.device)) for name, t in tensors.items()])
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

    def shutdown(self) -> None:
        """Leave the group."""
        super().shutdown()
        if self.receiver is not None:
            self.receiver.close()


def prepare(llm: LLM, weights: Weights) -> None:
    """Have every process of an engine build its receiver of a transfer between GPUs."""
    llm.init_weight_transfer_engine({"init_info": {"weights": weights.model_dump()}})


def join(llm: LLM, weights: Weights, address: str, offset: int, world: int) -> None:
    """Have the engine's processes be ranks ``offset`` and following of a new group, and leave an earlier one."""
    joining = {"weights": weights.model_dump(), "address": address, "offset": offset, "world": world}
    llm.init_weight_transfer_engine({"init_info": joining})


def load(llm: LLM, piece: Piece, tensors: dict[str, Tensor] | None = None, running: Running = "none") -> None:
    """Load one piece into an engine that computes nothing, in order; ``tensors`` None: its processes receive them.

    With the last piece the engine serves the version and has forgotten every cached prefix. What requests that are
    ``running`` have cached is forgotten as well and computed again (recompute), or kept (keep). Raises what the piece
    raises on its way, and leaves the engine half-updated: do not sample from it then.
    """
    if piece.number == 0:
        llm.start_weight_update()
    llm.update_weights({"update_info": {"piece": piece} if tensors is None else {"tensors": tensors}})
    if not piece.last:
        return
    llm.finish_weight_update(str(piece.version))
    if running == "keep":  # blocks are in use; prefixes of requests to come have another salt
        return
    if not llm.llm_engine.reset_prefix_cache(reset_running_requests=running == "recompute"):
        raise RuntimeError("vLLM did not reset its prefix cache after a weight update: blocks are still in use")
