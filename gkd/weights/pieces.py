"""Weights in pieces: which tensors travel together, and how those between GPUs lie in one buffer.

Everything here works on any device, and asks neither Ray nor vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gkd.errors import RunFailed

ALIGNMENT = 16
"""Bytes. Tensors of any type begin at a multiple of it, so that a part of the buffer can be looked at as that type."""

_WORDS_AT_ONCE = 1 << 22


def buckets(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Group named tensors into dictionaries of about ``bucket_bytes``; a larger tensor is one by itself."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


@dataclass(frozen=True, slots=True)
class Piece:
    """What an engine has to know of one packed buffer of weights; the bytes come another way."""

    version: int
    number: int
    """From 0 on in every push."""
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Names of torch's types: ``bfloat16``."""
    shapes: tuple[tuple[int, ...], ...]
    digest: tuple[int, int] | None = None
    """Of the packed bytes, see :func:`digest`; None: not to be checked."""
    handles: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """By GPU: how a process on it opens the buffer (:mod:`gkd.weights.ipc`)."""

    @classmethod
    def of(cls, bucket: Mapping[str, Tensor], version: int, number: int) -> Piece:
        """The layout of a bucket."""
        tensors = bucket.values()
        dtypes = tuple(str(t.dtype).removeprefix("torch.") for t in tensors)
        return cls(version, number, tuple(bucket), dtypes, tuple(tuple(t.shape) for t in tensors))

    def __str__(self) -> str:
        return f"weights version {self.version}, piece {self.number + 1}"

    def places(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], int, int]]:
        """Of every tensor: its name, type and shape, and where in the buffer it begins and ends, bytes."""
        start = 0
        for name, kind, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            dtype: torch.dtype = getattr(torch, kind)
            end = start + math.prod(shape) * dtype.itemsize
            yield name, dtype, shape, start, end
            start = _aligned(end)

    @property
    def n_bytes(self) -> int:
        """Size of the packed buffer."""
        return max((_aligned(end) for *_, end in self.places()), default=0)


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def pack(piece: Piece, bucket: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """The tensors of ``bucket``, whose layout is ``piece``, one after the other in a new buffer of bytes."""
    packed = torch.zeros(piece.n_bytes, dtype=torch.uint8, device=device)
    for name, dtype, shape, start, end in piece.places():
        packed[start:end].view(dtype).view(shape).copy_(bucket[name])
    return packed


def unpack(piece: Piece, packed: Tensor) -> dict[str, Tensor]:
    """The tensors in a buffer, without copying it. Raises RunFailed when it is not the buffer that ``piece`` is of."""
    if packed.dtype != torch.uint8 or packed.shape != (piece.n_bytes,):
        raise RunFailed(f"{piece}: {tuple(packed.shape)} {packed.dtype} came instead of {piece.n_bytes} bytes")
    if piece.digest is not None and digest(packed) != piece.digest:
        raise RunFailed(f"{piece} differs from what was sent (weights.checksum)")
    return {name: packed[start:end].view(dtype).view(shape) for name, dtype, shape, start, end in piece.places()}


def digest(packed: Tensor) -> tuple[int, int]:
    """The sum of a buffer's 32-bit words and that of the words times their places, both modulo 2^64.

    Two reductions on the buffer's own device, whose result does not depend on their order. Any one changed word is
    found, and any two that changed places.
    """
    words = packed.view(torch.int32)
    sums = torch.zeros(2, dtype=torch.int64, device=packed.device)
    for start in range(0, len(words), _WORDS_AT_ONCE):
        part = words[start : start + _WORDS_AT_ONCE].long()
        places = torch.arange(start + 1, start + 1 + len(part), device=packed.device)
        sums += torch.stack((part.sum(), (part * places).sum()))
    total, weighted = sums.tolist()
    return int(total), int(weighted)


class Packer:
    """One actor rank's end of the pushes between GPUs: gathers and packs one piece after the other.

    ``device`` is where the packed buffers are. Gathering is a collective: :meth:`open` and :meth:`next` are called on
    all ranks alike.
    """

    def __init__(self, device: torch.device, bucket_bytes: int, checksum: bool) -> None:
        self.device, self.bucket_bytes, self.checksum = device, bucket_bytes, checksum
        self.packed: Tensor | None = None
        """The bytes of the present piece, on a rank that packs."""
        self._pieces: Iterator[Piece] = iter(())

    def open(self, tensors: Iterable[tuple[str, Tensor]], version: int, packs: bool) -> None:
        """Begin a push. A rank that does not pack takes part in gathering and keeps nothing."""
        self._pieces = self._packed(tensors if packs else ((n, t.to("meta")) for n, t in tensors), version, packs)

    def next(self) -> Piece | None:
        """The next piece, or None after the last. The buffer of the one before must have been loaded everywhere."""
        self.packed = None
        return next(self._pieces, None)

    def _packed(self, tensors: Iterable[tuple[str, Tensor]], version: int, packs: bool) -> Iterator[Piece]:
        for number, bucket in enumerate(buckets(tensors, self.bucket_bytes)):
            piece = Piece.of(bucket, version, number)
            if packs:
                self.packed = pack(piece, bucket, self.device)
            bucket.clear()  # what was gathered is not needed beside its copy
            yield self.shown(piece) if packs else piece

    def shown(self, piece: Piece) -> Piece:
        """``piece`` with what an engine needs to get and to check :attr:`packed`."""
        assert self.packed is not None
        return replace(piece, digest=digest(self.packed)) if self.checksum else piece
