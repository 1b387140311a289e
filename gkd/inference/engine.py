"""What a sampling engine is, whichever library does the sampling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gkd.data.model_info import ModelInfo
from gkd.inference.vllm_engine import Device
from gkd.types import Sample, SampleRequest

if TYPE_CHECKING:
    from torch import Tensor

    from gkd.weights.pieces import Piece


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Where an engine stands among those of its group, ``rank``, and the model that it begins with.

    ``model`` describes the one in ``model_path``; sequences have up to ``max_length`` tokens.
    """

    model_path: str
    model: ModelInfo
    max_length: int
    rank: int
    device: Device


class SamplingEngine(Protocol):
    """Samples responses. All methods are called from one thread."""

    forward_passes: int
    """Passes through the model so far; grows while the engine works. Read from other threads."""
    version: int
    """Version of the weights that it samples from, as given to :meth:`load_weights`; 0 before."""

    def add(self, request: SampleRequest) -> None:
        """Take a request on. Raises ValueError when the engine cannot serve it."""

    def step(self) -> list[Sample]:
        """Work for a moment; return the samples that it finished, each with its request."""

    def busy(self) -> bool:
        """Whether requests are unfinished."""

    def sleep(self) -> None:
        """Give memory back while idle."""

    def wake(self, weights_only: bool) -> None:
        """Take it again; ``weights_only``: as far as :meth:`load_weights` needs."""

    def load_weights(self, pieces: Iterable[dict[str, Tensor]], version: int) -> None:
        """Replace the weights while idle."""


@runtime_checkable
class GpuReceiver(Protocol):
    """An engine that takes weights from other processes' GPUs, piece by piece while idle."""

    def join(self, unique_id: str, offset: int, world: int) -> None:
        """Meet the actor in an NCCL group of ``world`` ranks, with this engine's from ``offset`` on."""

    def take(self, piece: Piece) -> None:
        """Load the next piece."""

    def finish(self, version: int) -> None:
        """All pieces of ``version`` are loaded: serve it."""
