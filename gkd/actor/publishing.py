"""The weights of one rank of the actor, handed out piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gkd.config import Weights
from gkd.weights.packing import buckets
from gkd.weights.transfer import Piece, Sender

Named = Iterator[tuple[str, Tensor]]


class Publisher:
    """Gathers the weights in pieces of ``weights.bucket_mb`` and has the transfer's sender pack them.

    ``tensors`` begins to gather the current weights, by the names of the model's files; gathering is a collective, so
    :meth:`pack` is called on all ranks alike.
    """

    def __init__(self, settings: Weights, device: torch.device, tensors: Callable[[], Named]) -> None:
        self.settings, self._tensors, self._packs = settings, tensors, True
        transfer = settings.transfer_class
        self._on_host = not transfer.gpu_to_gpu
        self.sender: Sender = transfer.sender(settings, device)
        self._buckets: Iterator[tuple[dict[str, Tensor], bool]] = iter(())

    def pack(self, version: int, number: int, packs: bool) -> Piece:
        """Gather the next piece of ``version``, after the one before was loaded everywhere; ``number`` 0 begins a push.

        A rank that does not pack takes part in gathering and keeps nothing; its piece has no content.
        """
        self.sender.release()
        self._packs = packs
        if number == 0:
            self._buckets = buckets(self._gathered(), self.settings.bucket_mb << 20)
        bucket, last = next(self._buckets)
        if last:  # what gathered the pieces holds the last tensor
            self._buckets = iter(())
        piece = Piece(version, number, last)
        if not packs:
            return piece
        content = self.sender.pack(bucket, piece)
        bucket.clear()  # what was gathered is not needed beside its copy
        return Piece(version, number, last, (content,))

    def _gathered(self) -> Named:
        for name, tensor in self._tensors():
            if not self._packs:
                yield name, tensor.to("meta")
            else:
                yield name, tensor.cpu().contiguous() if self._on_host else tensor
