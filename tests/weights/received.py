"""The weights that an actor hands out, as an engine would receive them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from gkd.config import Weights
from gkd.weights.object_store import ObjectStoreReceiver
from gkd.weights.packing import split_into_buckets
from gkd.weights.transfer import Bucket


def received(pack: Callable[[int], list[Bucket]]) -> dict[str, Tensor]:
    """All tensors through the object store; ``pack`` gives the buckets of all ranks by number."""
    receiver, tensors = ObjectStoreReceiver(Weights(), torch.device("cpu")), {}
    for number in count():
        first, *others = pack(number)
        assert not any(bucket.contents for bucket in others)
        tensors |= receiver.receive(first)
        if first.last:
            return tensors
    raise AssertionError("count ends")


def load_in_buckets(engine: Any, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Have an engine load tensors as those of ``version``, a few at a time, and serve it, as a rollout worker does."""
    for number, (some, last) in enumerate(split_into_buckets(tensors, 20_000)):
        engine.load_weights(Bucket(version, number, last), some)
    engine.version = version
