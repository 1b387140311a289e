"""Which transfer weights take from the actor to the engines, by where both are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from gkd.config.cluster import TRANSFERS, Weights
from gkd.config.device import Device
from gkd.config.groups import Rollout
from gkd.errors import ConfigError


class Place(Protocol):
    """A worker, as a transfer needs it: on which device and which GPUs."""

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""

    @property
    def gpu_uuids(self) -> list[str]:
        """UUIDs of the worker's GPUs."""


def require_gpus(weights: Weights, device: Device) -> None:
    """Raise ConfigError for a transfer between GPUs where all workers are on ``device``, a CPU."""
    if device == "cpu" and weights.transfer_class.gpu_to_gpu:
        raise ConfigError(f"weights.transfer={weights.transfer}: there are no GPUs; object_store or auto would do")


def choose_transfer(weights: Weights, engine: Rollout, actor: Sequence[Place], rollout: Sequence[Place]) -> str:
    """Return the transfer that ``weights.transfer`` stands for; ``auto`` is the first of TRANSFERS that can work.

    ``actor`` and ``rollout`` are the reports of all workers in rank order, also those of an engine that spans several
    GPUs. Raises ConfigError for a transfer that cannot work there.
    """
    find_obstacle = partial(_find_obstacle, weights=weights, engine=engine, actor=actor, rollout=rollout)
    if weights.transfer == "auto":  # nothing else is looked at, such as packages that others need
        automatic = (name for name in TRANSFERS.entries if TRANSFERS.load(name).automatic)
        return next(name for name in automatic if find_obstacle(name) is None)
    if (reason := find_obstacle(weights.transfer)) is not None:
        others = " or ".join(f"weights.transfer={name}" for name in TRANSFERS.entries if find_obstacle(name) is None)
        raise ConfigError(f"weights.transfer={weights.transfer}: {reason}; {others} would work")
    return weights.transfer


def passes_worker(transfer: Any, adapter_only: bool) -> bool:
    """Return whether whole weights come to an engine's worker, through the host, instead of to its GPUs' processes.

    ``transfer`` is the class. An adapter by itself is small, and read from files.
    """
    return not (adapter_only or transfer.gpu_to_gpu)


def _find_obstacle(
    name: str, weights: Weights, engine: Rollout, actor: Sequence[Place], rollout: Sequence[Place]
) -> str | None:
    transfer = TRANSFERS.load(name)
    if weights.adapter_only and transfer.gpu_to_gpu:
        return "an adapter alone goes through the host (weights.adapter_only)"
    if transfer.gpu_to_gpu and not engine.engine_class.gpu_transfers:
        return f"rollout.engine={engine.engine} takes no weights from GPU to GPU"
    reason: str | None = transfer.find_obstacle(actor, rollout)
    return reason
