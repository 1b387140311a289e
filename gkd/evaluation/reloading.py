"""Other weights into engines that run already: the checkpoints of one run, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gkd.config import Weights
from gkd.errors import RunFailed
from gkd.rollout.group import RolloutGroup
from gkd.weights.object_store import ObjectStoreSender
from gkd.weights.packing import buckets
from gkd.weights.transfer import Piece

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class FurtherWeights:
    """Weights that engines with a model of the same kind load.

    ``name`` is what tables call the model that has them, ``fingerprint`` what its answers are kept by. ``read`` yields
    them by the names and in the shapes of the model's files, on the host.
    """

    name: str
    fingerprint: str
    read: Callable[[], Iterator[tuple[str, Tensor]]]


def load_weights(weights: FurtherWeights, rollout: RolloutGroup, settings: Weights, version: int) -> None:
    """Have every engine load ``weights``, in pieces through the object store, and serve them as ``version``.

    Raises RunFailed when that takes longer than ``weights.timeout_s`` or leaves no engine.
    """
    import torch

    deadline, sender = time.monotonic() + settings.timeout_s, ObjectStoreSender(settings, torch.device("cpu"))
    served: dict[int, int] = {}
    for number, (bucket, last) in enumerate(buckets(weights.read(), settings.bucket_mb << 20)):
        piece = Piece(version, number, last)
        piece = replace(piece, contents=(sender.pack(bucket, piece),))
        left = max(0.0, deadline - time.monotonic())
        served = rollout.tell("receive", piece, timeout_s=left, what=f"loading the weights of {weights.name}")
    for engine, its in served.items():
        if its != version:
            raise RunFailed(f"{rollout.group.reports[engine]} does not serve the weights of {weights.name}")
