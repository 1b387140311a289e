"""Weights through Ray's object store: works between any two processes, with or without GPUs.

A bucket is safetensors in an object of Ray's, which lives as long as the reference in the bucket. Nothing is unpickled
but bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gkd.errors import RunFailed
from gkd.weights.transfer import Bucket, Receiver, Sender, Transfer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class StoredBucket:
    """A reference to the bytes of a bucket, and their SHA-256 where ``weights.checksum`` is set."""

    ref: Any
    sha256: str | None


class ObjectStoreSender(Sender):
    """Puts each bucket into the object store."""

    def pack(self, tensors: dict[str, Tensor], bucket: Bucket) -> StoredBucket:
        """Return a reference to the tensors, whatever their types and shapes."""
        import numpy as np
        import ray
        from safetensors.torch import save

        data = save(tensors)
        digest = hashlib.sha256(data).hexdigest() if self.settings.checksum else None
        return StoredBucket(ray.put(np.frombuffer(data, dtype=np.uint8)), digest)


class ObjectStoreReceiver(Receiver):
    """Fetches each bucket."""

    def receive(self, bucket: Bucket) -> dict[str, Tensor]:
        """Return the tensors. Raises RunFailed when they do not arrive within ``weights.timeout_s`` or are others."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError
        from safetensors.torch import load

        stored: StoredBucket = bucket.contents[0]
        limit = self.settings.timeout_s
        try:
            data = ray.get(stored.ref, timeout=limit).tobytes()
        except GetTimeoutError:
            raise RunFailed(f"{bucket} did not arrive within {limit:g} s (weights.timeout_s)") from None
        except RayError as error:
            raise RunFailed(f"{bucket} is lost: {type(error).__name__}") from None
        if stored.sha256 is not None and hashlib.sha256(data).hexdigest() != stored.sha256:
            raise RunFailed(f"{bucket} differs from what was sent (SHA-256)")
        return load(data)


class ObjectStore(Transfer):
    """Through Ray, everywhere."""

    sender = ObjectStoreSender
    receiver = ObjectStoreReceiver
