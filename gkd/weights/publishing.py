"""The weights of one rank of the actor, handed out bucket by bucket."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gkd.config import Weights
from gkd.weights.delivery import Delivery
from gkd.weights.packing import split_into_buckets
from gkd.weights.transfer import IN_FLIGHT, Bucket, Sender

if TYPE_CHECKING:
    from gkd.weights.file_names import Named


class Publisher:
    """Gathers the weights in buckets of ``weights.bucket_mb`` and has the transfer's sender pack them.

    ``tensors`` begins to gather the current weights, by the names of the model's files; gathering is a collective, so
    :meth:`send` is called on all ranks alike.
    """

    def __init__(self, settings: Weights, device: torch.device, tensors: Callable[[], Named]) -> None:
        self.settings, self._tensors, self._packs = settings, tensors, True
        self._transfer = settings.transfer_class
        self.sender: Sender = self._transfer.sender(settings, device)
        self._buckets: Iterator[tuple[dict[str, Tensor], bool]] = iter(())

    def send(self, delivery: Delivery) -> None:
        """Send all buckets of the current weights, each as soon as it is packed. A collective.

        A rank whose buckets nobody receives, or nobody any more, takes part in gathering; so does one that cannot send,
        which raises why at the end.
        """
        last, number = False, 0
        try:
            while not last:
                packs = self._has_receivers(delivery)
                bucket = self.pack(delivery.push.version, number, packs)
                if packs:
                    delivery.send(bucket)
                    if self._transfer.collective:
                        self.sender.broadcast()
                    delivery.make_room()
                last, number = bucket.last, number + 1
            delivery.make_room(0)
            self._has_receivers(delivery)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # which hold what was gathered: memory may be short
            self.sender.release()
            self._packs = False
            for _ in self._buckets:  # gathering takes all ranks, also one that cannot go on
                pass
            raise
        self.sender.release()

    def _has_receivers(self, delivery: Delivery) -> bool:
        """Return whether any engine still receives from here; where all are lost, nobody has buckets open any more."""
        if delivery.lost and not delivery.destinations:
            self.sender.forget_receivers()
        return bool(delivery.destinations)

    def pack(self, version: int, number: int, packs: bool) -> Bucket:
        """Gather the next bucket of ``version``, the one before the last being loaded everywhere; 0 begins a push.

        A rank that does not pack takes part in gathering and keeps nothing; its bucket has no content.
        """
        self.sender.release(keep=IN_FLIGHT - 1 if packs and number else 0)
        self._packs = packs
        if number == 0:
            self._buckets = split_into_buckets(self._gather(), self.settings.bucket_mb << 20)
        tensors, last = next(self._buckets)
        if last:  # what gathered the buckets holds the last tensor
            self._buckets = iter(())
        bucket = Bucket(version, number, last)
        if not packs:
            return bucket
        content = self.sender.pack(tensors, bucket)
        tensors.clear()  # what was gathered is not needed beside its copy
        return Bucket(version, number, last, (content,))

    def _gather(self) -> Named:
        for name, tensor in self._tensors():
            if not self._packs:
                yield name, tensor.to("meta")
            else:
                yield name, tensor if self._transfer.gpu_to_gpu else tensor.cpu().contiguous()
