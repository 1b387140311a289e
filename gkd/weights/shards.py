"""Ways of vLLM's own that need not gather: its trainer engine in every rank of the actor, its worker engine in vLLM.

A push is then four calls of vLLM's protocol (init, start, update, finish), the first only where engines have changed.
They travel as the buckets of other ways do (:mod:`gkd.weights.delivery`): from actor rank 0 to the engines, in order,
each with its deadline, and the driver makes its one call to every worker. The weights themselves go as the backend has
it. A class of such a way derives from :class:`ShardTransfer`.
"""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from gkd.config.transfer import Place
from gkd.weights.transfer import Receiver, Sender, Transfer, find_gpu_obstacle, find_shared_gpu

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class FilePart:
    """A rank's part of a tensor of the model's files, which is of ``dtype`` and ``shape`` when it is whole.

    That is one of as many equal parts as there are ranks, along ``dim``; None: all of it.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int | None


class ShardSource(Protocol):
    """The current weights on one rank of the actor, by the names of the model's files."""

    def layout(self) -> list[FilePart]:
        """Return what every tensor is, without gathering any."""

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank has of each, in the order of ``layout``. A collective: what ranks have no equal parts of
        is gathered.
        """

    def gather(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield each gathered, in the order of ``names``, which are all of them. A collective."""


@dataclass(frozen=True, slots=True)
class ShardCall:
    """A call of vLLM's protocol to the engines ``engines`` together, by their ranks; the content of a bucket."""

    verb: Literal["init", "start", "update", "finish"]
    info: dict[str, Any] = field(default_factory=dict, repr=False)
    engines: tuple[int, ...] = ()

    def place_of(self, engine: int) -> dict[str, int]:
        """Return which of the engines ``engine`` is, as vLLM's backends name it."""
        return {"replica_rank": self.engines.index(engine), "num_replicas": len(self.engines)}


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Participants of a transfer: this rank of ``n_ranks`` of the actor, ``n_engines`` engines of ``span`` processes.

    ``address`` is what :meth:`ShardTransfer.new_address` returned on rank 0; no wait takes longer than ``limit_s``.
    """

    rank: int
    n_ranks: int
    n_engines: int
    span: int
    address: str
    limit_s: float

    @property
    def n_receivers(self) -> int:
        """Processes of all engines."""
        return self.n_engines * self.span


class ShardTransfer(Transfer):
    """A backend of vLLM's. ``packages``: modules that it needs, with what to install for each."""

    gpu_to_gpu = collective = shards = True
    automatic = False
    sender, receiver = Sender, Receiver  # neither is built: vLLM has both ends
    packages: ClassVar[dict[str, str]] = {}

    @classmethod
    def new_address(cls) -> str:
        """Return what a new group meets by, on rank 0. Raises RunFailed where there can be none."""
        return ""

    @classmethod
    @abstractmethod
    def trainer(cls, rendezvous: Rendezvous, source: ShardSource, client: Any) -> Any:
        """Return vLLM's trainer engine of this rank, connected. A collective of all ranks and engines.

        Raises ValueError or ImportError, before anybody is met, for what it cannot send or what it lacks.
        """

    @classmethod
    def find_obstacle(cls, actor: Sequence[Place], rollout: Sequence[Place]) -> str | None:
        """Return why not every worker is on a GPU of its own, or what is not installed here; None where all is well."""
        workers = (*actor, *rollout)
        return find_gpu_obstacle(workers) or find_shared_gpu(workers) or cls.find_lacking()

    @classmethod
    def find_lacking(cls) -> str | None:
        """Return what is not installed here, and what to do about it; None where all is there."""
        for module, install in cls.packages.items():
            if not is_installed(module):
                return f"Python finds no {module} here; {install}"
        return None


def is_installed(module: str) -> bool:
    """Return whether Python finds a module, which is not imported, in packages that can be."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, OSError):  # of the package that it would be in, or of a library that this loads
        return False
