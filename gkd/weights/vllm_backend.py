"""The receiving end inside vLLM: a backend that loads buckets of weights, whichever transfer brings them.

vLLM's weight-transfer API changes between releases: its engines' side is here, in :mod:`gkd.weights.vllm_reload` and
:mod:`gkd.weights.vllm_m2n`, the actor's in :mod:`gkd.weights.nccl` and :mod:`gkd.weights.vllm_sources`. The backend
derives from vLLM's CUDA IPC engine for its layer-wise reload around an update and replaces how tensors arrive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from vllm import LLM
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

from gkd.config import Weights
from gkd.weights.shards import ShardCall
from gkd.weights.transfer import Bucket, Receiver
from gkd.weights.vllm_reload import Reload

CachePolicy = Literal["none", "recompute", "keep"]
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
class BucketUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One bucket: its tensors, by the names of the model's files, or what the receiver needs to get them."""

    tensors: dict[str, Tensor] | None = None
    bucket: Bucket | None = None


class BucketTransferEngine(Reload, IPCWeightTransferEngine):  # type: ignore[misc]
    """Loads tensors handed over in the call itself, or received by this process from a GPU."""

    init_info_cls = ReceiverInfo
    update_info_cls = BucketUpdate
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

    def receive_weights(self, update_info: BucketUpdate) -> None:
        """Hand the tensors to the model's own loader, which maps its fused and sharded layers."""
        tensors = update_info.tensors
        if tensors is None:
            assert self.receiver is not None and update_info.bucket is not None
            tensors = self.receiver.receive(update_info.bucket)
        load_weights: Any = self.model.load_weights
        with self.load_meanwhile():
            load_weights((name, t.to(self.device)) for name, t in tensors.items())  # as they are loaded

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


def load(
    llm: LLM, bucket: Bucket, tensors: dict[str, Tensor] | None = None, running: CachePolicy = "none", rank: int = 0
) -> None:
    """Load one bucket into an engine that computes nothing, in order; ``tensors`` None: its processes receive them.

    With the last bucket the engine serves the version and has forgotten every cached prefix. What requests that are
    ``running`` have cached is forgotten as well and computed again (recompute), or kept (keep). ``rank`` is the
    engine's. Raises what the bucket raises on its way, and leaves the engine half-updated: do not sample from it then.
    """
    call = bucket.contents[0] if bucket.contents else None
    if isinstance(call, ShardCall):
        _do(llm, call, rank)
    else:
        if bucket.number == 0:
            llm.start_weight_update()
        llm.update_weights({"update_info": {"bucket": bucket} if tensors is None else {"tensors": tensors}})
    if not bucket.last:
        return
    llm.finish_weight_update(str(bucket.version))
    reset_cache(llm, running)


def reset_cache(llm: LLM, running: CachePolicy) -> None:
    """Forget what other weights have cached, by the policy ``running``. Raises RuntimeError where vLLM does not."""
    if running == "keep":  # blocks are in use; prefixes of requests to come have another salt
        return
    if not llm.llm_engine.reset_prefix_cache(reset_running_requests=running == "recompute"):
        raise RuntimeError("vLLM did not reset its prefix cache after a weight update: blocks are still in use")


def _do(llm: LLM, call: ShardCall, rank: int) -> None:
    """Do a call of one of vLLM's own transfers; the last of a push, finish, is that of any push."""
    if call.verb == "init":
        llm.init_weight_transfer_engine({"init_info": call.info | call.place_of(rank)})
    elif call.verb == "start":
        llm.start_weight_update()
    elif call.verb == "update":
        llm.update_weights({"update_info": call.info})
