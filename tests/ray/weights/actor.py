"""The actor's end of a push on CPUs: apart, since engines need nothing of what it imports."""

from __future__ import annotations

from torch import Tensor

from gkd.actor.publishing import WeightSource
from gkd.actor.worker import ActorWorker
from gkd.config import Config


class CpuActor(ActorWorker):
    """A real actor rank on a CPU. ``gpus``: the UUID that each rank is to be on."""

    def __init__(self, config: Config, path: str, rank: int, world: int, gpus: list[str]) -> None:
        super().__init__(config, path, rank, world, "cpu")
        self.gpu = gpus[rank]

    def use(self, config: Config) -> None:
        """Send another way from now on."""
        self.weights = WeightSource(config.weights, self.device, self.dtype)
        self.weights.trainer = self.trainer
        self.weights.publisher.sender.gpu = self.gpu

    def gathered(self) -> dict[str, Tensor]:
        """All of them, gathered. A collective."""
        return {name: t.clone() for name, t in self.trainer.student.gather_full_tensors(self.dtype)}
