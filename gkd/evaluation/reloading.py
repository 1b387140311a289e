"""Other weights into engines that run already: the checkpoints of one run, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gkd.config import Weights
from gkd.errors import RunFailed
from gkd.rollout.group import RolloutGroup
from gkd.weights.delivery import Delivery, Destination, Push

if TYPE_CHECKING:
    from torch import Tensor


class WeightsDeleted(RunFailed):
    """Weights that were deleted before they were read, as by a run that goes on."""


@dataclass(frozen=True, eq=False)
class FurtherWeights:
    """Weights that engines with a model of the same kind load.

    ``name`` is what tables call the model that has them, ``fingerprint`` what its answers are kept by. ``read`` yields
    them by the names and in the shapes of the model's files, on the host, or raises WeightsDeleted.
    """

    name: str
    fingerprint: str
    read: Callable[[], Iterator[tuple[str, Tensor]]]


def load_weights(weights: FurtherWeights, rollout: RolloutGroup, settings: Weights, version: int) -> None:
    """Have every engine load ``weights``, in buckets through the object store, and serve them as ``version``.

    Versions rise. Raises RunFailed when that takes longer than ``weights.timeout_s`` or leaves no engine, and
    WeightsDeleted, with the engines as they were.
    """
    import torch

    from gkd.weights.publishing import Publisher

    engines, limit = rollout.present_engines, settings.timeout_s
    push = Push(version, version, limit)
    delivery = Delivery(push, [Destination(engine, rollout.group.workers[engine], 1) for engine in engines])
    Publisher(settings, torch.device("cpu"), weights.read).send(delivery)
    activity = f"loading the weights of {weights.name}"
    served = rollout.call_engines("weights.receive", push, timeout_s=limit, activity=activity, engines=engines)
    for engine, served_version in served.items():
        if served_version != version:
            raise RunFailed(f"{rollout.group.reports[engine]} does not serve the weights of {weights.name}")
