"""The weight transfer of a layout, whose workers are only planned."""

from __future__ import annotations

from dataclasses import dataclass

from gkd.config.transfer import choose_transfer
from gkd.planning.layout import Layout


def transfer_of(layout: Layout) -> str:
    """Return the weight transfer of a run: ``weights.transfer``, or what ``auto`` chooses for workers so placed."""
    weights = layout.config.weights
    return _choose_transfer(layout) if weights.transfer == "auto" else weights.transfer


def require_transfer(layout: Layout) -> None:
    """Raise ConfigError for a ``weights.transfer`` that cannot work between workers so placed."""
    if layout.config.weights.transfer_class.find_lacking() is None:  # packages may be where the GPUs are
        _choose_transfer(layout)


def _choose_transfer(layout: Layout) -> str:
    config, is_cpu = layout.config, layout.hardware.is_cpu
    own_gpus = not is_cpu and {"actor", "rollout"} not in layout.may_share
    device = "cpu" if is_cpu else "cuda"
    actor = _PlannedWorker("the actor", device, ["the actor's"])
    rollout = _PlannedWorker("the engine", device, ["the engine's"] if own_gpus else actor.gpu_uuids)
    return choose_transfer(config.weights, config.rollout, [actor], [rollout])


@dataclass(frozen=True)
class _PlannedWorker:
    """Places a worker that is only planned (:class:`gkd.weights.transfer.Place`)."""

    name: str
    device: str
    gpu_uuids: list[str]

    def __str__(self) -> str:
        return self.name
