"""Weights in buckets: which tensors travel together, and how those between GPUs lie in one buffer.

Everything here works on any device, and needs neither Ray nor vLLM.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gkd.config.device import PushLoad
from gkd.errors import RunFailed
from gkd.weights.transfer import IN_FLIGHT, Bucket, Sender, Transfer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gkd.config import Weights

ALIGNMENT = 16
"""Bytes. Tensors of any type begin at a multiple of it, so that a part of the buffer can be looked at as that type."""

_WORDS_AT_ONCE = 1 << 22


def split_into_buckets(
    tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int
) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Group named tensors into dictionaries of about ``bucket_bytes``; a larger tensor is one by itself.

    With each, whether it is the last one.
    """
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket, False
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket, True


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Places of tensors in a packed buffer."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Names of torch's types: ``bfloat16``."""
    shapes: tuple[tuple[int, ...], ...]
    digest: tuple[int, int] | None = None
    """Of the packed bytes, see :func:`digest`; None: not to be checked."""

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> PackedLayout:
        """Return the layout of the tensors of a bucket."""
        dtypes = tuple(str(t.dtype).removeprefix("torch.") for t in tensors.values())
        return cls(tuple(tensors), dtypes, tuple(tuple(t.shape) for t in tensors.values()))

    def places(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], int, int]]:
        """Return every tensor's name, type and shape, and where in the buffer it begins and ends, bytes."""
        import torch

        start = 0
        for name, kind, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            dtype: torch.dtype = getattr(torch, kind)
            end = start + math.prod(shape) * dtype.itemsize
            yield name, dtype, shape, start, end
            start = _align(end)

    @property
    def n_bytes(self) -> int:
        """Size of the packed buffer."""
        return max((_align(end) for *_, end in self.places()), default=0)


def _align(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def pack(layout: PackedLayout, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Return ``tensors``, one after the other in a new buffer of bytes."""
    import torch

    packed = torch.zeros(layout.n_bytes, dtype=torch.uint8, device=device)
    for name, dtype, shape, start, end in layout.places():
        packed[start:end].view(dtype).view(shape).copy_(tensors[name])
    return packed


def unpack(bucket: Bucket, layout: PackedLayout, packed: Tensor) -> dict[str, Tensor]:
    """Return the tensors in a buffer, without copying it. Raises RunFailed when it is not the buffer of ``bucket``."""
    import torch

    if packed.dtype != torch.uint8 or packed.shape != (layout.n_bytes,):
        raise RunFailed(f"{bucket}: {tuple(packed.shape)} {packed.dtype} came instead of {layout.n_bytes} bytes")
    if layout.digest is not None and digest(packed) != layout.digest:
        raise RunFailed(f"{bucket} differs from what was sent (weights.checksum)")
    return {name: packed[start:end].view(dtype).view(shape) for name, dtype, shape, start, end in layout.places()}


def digest(packed: Tensor) -> tuple[int, int]:
    """Return the sum of a buffer's 32-bit words and that of the words times their places, both modulo 2^64.

    Two reductions on the buffer's own device, whose result does not depend on their order. Any one changed word is
    found, and any two that changed places.
    """
    import torch

    words = packed.view(torch.int32)
    sums = torch.zeros(2, dtype=torch.int64, device=packed.device)
    for start in range(0, len(words), _WORDS_AT_ONCE):
        part = words[start : start + _WORDS_AT_ONCE].long()
        places = torch.arange(start + 1, start + 1 + len(part), device=packed.device)
        sums += torch.stack((part.sum(), (part * places).sum()))
    total, weighted = sums.tolist()
    return int(total), int(weighted)


class PackingSender(Sender):
    """Packs each bucket into one buffer on the sender's device."""

    def __init__(self, settings: Weights, device: torch.device) -> None:
        super().__init__(settings, device)
        self._held: deque[Tensor] = deque()

    @property
    def packed_bucket(self) -> Tensor | None:
        """The bytes of the bucket that was packed last, while they are held."""
        return self._held[-1] if self._held else None

    def pack_buffer(self, tensors: Mapping[str, Tensor]) -> PackedLayout:
        """Pack ``tensors`` into :attr:`packed_bucket`; returns their layout.

        It has a digest where weights.checksum is set.
        """
        layout = PackedLayout.from_tensors(tensors)
        packed = pack(layout, tensors, self.device)
        self._held.append(packed)
        return replace(layout, digest=digest(packed)) if self.settings.checksum else layout

    def release(self, keep: int = 0) -> None:
        """Free all buffers but the newest ``keep``."""
        while len(self._held) > keep:
            self._held.popleft()


class PackedTransfer(Transfer):
    """A way of packed buckets from GPU to GPU."""

    gpu_to_gpu = True

    @classmethod
    def count_sent_bytes(cls, push: PushLoad) -> float:
        """Return the bytes of the buckets that are packed, of what the newest is packed of, and of the next tensor.

        Experts are sent one by one, and gathered together. A tensor larger than a bucket is one by itself.
        """
        if push.total <= push.bucket:
            return 2 * push.total
        bucket = max(push.bucket, push.tensor)
        in_layers = min(push.total, IN_FLIGHT * bucket) + max(bucket, push.whole) + push.gathered
        in_root = 2 * max(push.bucket, push.root) + push.bucket + push.gathered
        return max(in_layers, in_root)

    @classmethod
    def count_received_bytes(cls, push: PushLoad) -> float:
        """Return the bytes of the buckets that a module's tensors lie in, and of what these are loaded into.

        vLLM loads a module once all of its tensors are there: the buckets are whole, and two at least, until then.
        """
        in_layers = min(push.total, max(2 * push.bucket, push.module + push.bucket)) + push.module / push.width
        in_root = min(push.total, max(push.bucket, push.root)) + push.root / push.width
        return max(in_layers, in_root)
