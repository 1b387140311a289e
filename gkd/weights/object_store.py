"""Weights through Ray's object store: works between any two processes, with or without GPUs.

The sender packs named tensors into safetensors pieces and keeps references to them in a :class:`Push`; each receiver
fetches one piece at a time. Nothing is unpickled but bytes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayError
from safetensors.torch import load, save
from torch import Tensor

from gkd.errors import RunFailed
from gkd.weights.pieces import buckets


@dataclass(frozen=True, slots=True)
class Push:
    """One version of the weights on its way. ``digests`` (SHA-256 of each piece) is empty when not asked for."""

    version: int
    n_bytes: int
    pieces: list[ObjectRef] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)


def send(tensors: Iterable[tuple[str, Tensor]], version: int, bucket_bytes: int, checksum: bool) -> Push:
    """Put weights into the object store; they live as long as the references in the returned push."""
    pieces: list[ObjectRef] = []
    digests: list[str] = []
    n_bytes = 0
    on_host = ((name, tensor.cpu().contiguous()) for name, tensor in tensors)
    for bucket in buckets(on_host, bucket_bytes):
        data = save(bucket)
        n_bytes += len(data)
        if checksum:
            digests.append(hashlib.sha256(data).hexdigest())
        pieces.append(ray.put(np.frombuffer(data, dtype=np.uint8)))
    return Push(version, n_bytes, pieces, digests)


def receive(push: Push, timeout_s: float) -> Iterator[dict[str, Tensor]]:
    """The pieces of a push, one after the other.

    Raises RunFailed when a piece does not arrive within ``timeout_s`` for all of them, or is not what was sent.
    """
    deadline = time.monotonic() + timeout_s
    for number, piece in enumerate(push.pieces):
        what = f"weights version {push.version}, piece {number + 1} of {len(push.pieces)}"
        try:
            data = ray.get(piece, timeout=max(0.0, deadline - time.monotonic())).tobytes()
        except GetTimeoutError:
            raise RunFailed(f"{what} did not arrive within {timeout_s:g} s (weights.timeout_s)") from None
        except RayError as error:
            raise RunFailed(f"{what} is lost: {type(error).__name__}") from None
        if push.digests and hashlib.sha256(data).hexdigest() != push.digests[number]:
            raise RunFailed(f"{what} differs from what was sent (SHA-256)")
        yield load(data)
