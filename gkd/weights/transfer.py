"""What a transfer of weights is: a sender in every rank of the actor, a receiver in every process of the engines.

The setting ``weights.transfer`` names a class that derives from :class:`Transfer`. The ranks pack one :class:`Bucket`
after the other and send them to the engines (:mod:`gkd.weights.delivery`), which load them in their order; deadlines
and deaths are the driver's (:mod:`gkd.driver.groups.weight_sync`). The modules of such classes import torch, vLLM and
Ray within functions alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from gkd.config.device import PushLoad
from gkd.config.transfer import Place

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gkd.config import Weights


IN_FLIGHT = 2
"""Buckets at most that are packed and not loaded everywhere."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A part of one version of the weights.

    ``number`` counts from 0 in every push, and ``last`` marks the end of one. ``contents`` are what the senders that
    packed the bucket made of it, in the order in which they came: what a receiver gets the tensors from.
    """

    version: int
    number: int
    last: bool
    contents: tuple[Any, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return f"weights version {self.version}, bucket {self.number + 1}"


class Sender(ABC):
    """The part of a transfer in one rank of the actor, on ``device``."""

    def __init__(self, settings: Weights, device: torch.device) -> None:
        self.settings, self.device = settings, device

    @abstractmethod
    def pack(self, tensors: dict[str, Tensor], bucket: Bucket) -> Any:
        """Make the tensors of ``bucket`` ready to be received, by the names of the model's files; returns its content.

        Called on the ranks of :meth:`Transfer.packing`. Tensors are on the GPU for a ``gpu_to_gpu`` transfer, else on
        the host.
        """

    def release(self, keep: int = 0) -> None:  # noqa: B027 (a sender need not hold anything)
        """Free what :meth:`pack` holds, but the newest ``keep`` buckets: every engine has loaded the others."""

    def forget_receivers(self) -> None:  # noqa: B027 (nor wait for those that hold it)
        """Count what :meth:`pack` holds as closed by the engines that received from this rank: they are all gone."""

    def new_group(self) -> str:
        """Return, on rank 0 of a ``collective`` transfer, the address of a new group. Raises RunFailed where there is
        none.
        """
        raise NotImplementedError

    def join(self, address: str, world: int) -> None:
        """Join a group of ``world`` ranks as rank 0, while the receivers join it. Leaves an earlier group."""
        raise NotImplementedError

    def broadcast(self) -> None:
        """Send the bucket that was packed last to the group, while the receivers receive it."""
        raise NotImplementedError


class Receiver(ABC):
    """The part of a transfer in an engine.

    That is in the process of the rollout worker, where ``device`` is the CPU; for a ``gpu_to_gpu`` transfer in every
    process of the engine, on the GPU ``device`` of that process.
    """

    def __init__(self, settings: Weights, device: torch.device) -> None:
        self.settings, self.device = settings, device

    @abstractmethod
    def receive(self, bucket: Bucket) -> dict[str, Tensor]:
        """Return the tensors of ``bucket``. Raises RunFailed when they do not come or are not what was sent."""

    def join(self, address: str, rank: int, world: int) -> None:
        """Join a group of ``world`` ranks, while the actor joins it. Leaves an earlier group."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027 (nor a receiver be in a group)
        """Leave the group."""


class Transfer:
    """A way for weights. A nested pydantic model ``Config`` holds settings of the class' own."""

    expandable_segments: ClassVar[bool] = True
    """Whether weights may lie in memory that torch's allocator has by PYTORCH_CUDA_ALLOC_CONF=expandable_segments."""
    gpu_to_gpu: ClassVar[bool] = False
    """Whether weights stay on GPUs; else they pass through the host's memory, which every engine can load from."""
    host_byte_s: ClassVar[float] = 1 / 0.44e9 + 1 / 1.5e9
    """Seconds that a byte takes through the host: safetensors.torch.save and load, measured on two cores."""
    collective: ClassVar[bool] = False
    """Whether sender and receivers form a group in which all take part in each bucket: a death there ends the run."""
    shards: ClassVar[bool] = False
    """Whether a push is one transfer of vLLM's own, see :mod:`gkd.weights.shards`, instead of buckets."""
    gathers: ClassVar[bool] = True
    """Whether the actor's ranks gather whole tensors before they send them."""
    automatic: ClassVar[bool] = True
    """Whether ``weights.transfer=auto`` may choose it."""
    ray_executor: ClassVar[bool] = False
    """Whether vLLM's processes of an engine have to be actors of Ray's, which share GPUs with the workers."""
    backend: ClassVar[str] = "gkd"
    """The name by which vLLM finds the engines' end, see :mod:`gkd.weights.vllm_plugin`."""
    sender: ClassVar[type[Sender]]
    receiver: ClassVar[type[Receiver]]

    @classmethod
    def find_obstacle(cls, actor: Sequence[Place], rollout: Sequence[Place]) -> str | None:
        """Return why the transfer cannot work between these workers, in rank order; None where it can."""
        return None

    @classmethod
    def find_lacking(cls) -> str | None:
        """Return what is not installed here, and what to do about it; None where all is there."""
        return None

    @classmethod
    def packing(cls, actor: Sequence[Place], gpus: set[str]) -> list[bool]:
        """Return, by rank of the actor, whether its buckets are received by engines on ``gpus``."""
        return [rank == 0 for rank in range(len(actor))]

    @classmethod
    def count_sent_bytes(cls, push: PushLoad) -> float:
        """Return the bytes of an actor rank's GPU that a push takes: a tensor, on its way to the host."""
        return max(push.gathered, push.root)

    @classmethod
    def count_received_bytes(cls, push: PushLoad) -> float:
        """Return the bytes of an engine's GPU that a push takes: a module's weights, until it has them all, and then
        what it is loaded into.
        """
        largest = max(push.module, push.root)
        return largest + largest / push.width


def find_gpu_obstacle(workers: Sequence[Place]) -> str | None:
    """Return why memory of these workers' GPUs cannot be reached by other processes; None where it can."""
    for worker in workers:
        if worker.device == "cpu":
            return f"{worker} computes on a CPU"
        if any(uuid.startswith("MIG-") for uuid in worker.gpu_uuids):
            return f"{worker} is on a slice of a GPU (MIG)"
    return None


def find_shared_gpu(ranks: Sequence[Place]) -> str | None:
    """Return which ranks of a transfer are on one GPU; None where each has GPUs of its own."""
    owner: dict[str, Place] = {}
    for rank in ranks:
        for uuid in rank.gpu_uuids:
            if uuid in owner:
                return f"{rank} and {owner[uuid]} are both on {uuid}, and it takes one rank a GPU"
            owner[uuid] = rank
    return None
