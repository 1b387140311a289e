"""What an engine's worker sends to the driver: samples once they are scored, several at a time."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from gkd.rollout.columns import ScoredSamples
from gkd.rollout.slots import Slots
from gkd.types import GenerationNotice, SampleRequest, ScoredSample, TrainingSample

GATHER_S = 0.05
"""Scored samples wait so long for others, so that the driver gets few messages."""
MOST_BATCHES = 1_000
"""Of one stream: Ray keeps some bytes of every item of a generator until that has ended."""
SampleAndArrays: TypeAlias = tuple[TrainingSample, ScoredSample]


class OutputQueue:
    """Holds what is to be sent; :class:`gkd.rollout.stream.SampleStream` takes it in. Any thread may put.

    ``capacity``: the engine's slots, which decide what is announced to the driver before it is scored.
    """

    def __init__(self, capacity: int) -> None:
        self._slots = Slots(capacity)
        self._items: queue.Queue[list[SampleAndArrays] | GenerationNotice | BaseException] = queue.Queue()

    def put(self, item: list[SampleAndArrays] | BaseException) -> None:
        """Send scored samples, or what ends :meth:`batches`."""
        self._items.put(item)

    def accept(self, requests: Sequence[SampleRequest]) -> None:
        """Note requests that the engine has taken on."""
        self._announce(self._slots.take({request.key: request.order for request in requests}))

    def put_generated(self, keys: Sequence[int]) -> None:
        """Announce samples that are generated, and to be scored now."""
        self._announce(self._slots.generate(keys))

    def _announce(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._items.put(GenerationNotice(key))

    def batches(self) -> Iterator[list[ScoredSample] | list[TrainingSample | GenerationNotice]]:
        """Yield scored samples as they come, several at a time: a list of their arrays, then their numbers.

        Ends after :data:`MOST_BATCHES`; what follows is yielded by the next call.
        Being streamed, they belong to the driver, not to this process: they outlive it. Samples that are generated and
        not scored yet are among the latter where the driver may have others for their slots, or waits for the engine to
        have sampled all. Raises what was put to end this.
        """
        for _ in range(MOST_BATCHES):
            arrays, samples = self.gather()
            self._slots.deliver(sample.key for sample in samples if isinstance(sample, TrainingSample))
            yield arrays
            yield samples

    def gather(self) -> tuple[ScoredSamples, list[TrainingSample | GenerationNotice]]:
        """Wait for scored samples, and a moment for more of them where nobody waits for these.

        Returns their arrays and their numbers, as :meth:`batches` yields them. Raises what was put to end this.
        """
        arrays, samples = ScoredSamples(), list[TrainingSample | GenerationNotice]()
        keys: set[int] = set()
        item = self._items.get()
        end = time.monotonic() + GATHER_S
        while True:
            waits = False
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, GenerationNotice):
                samples.append(item)
            else:
                samples += [sample for sample, _ in item]
                arrays += [scored for _, scored in item]
                keys.update(sample.key for sample, _ in item)
                waits = self._slots.may_wait(keys)
            try:
                item = self._items.get(timeout=max(0.0, end - time.monotonic()) if waits else 0.0)
            except queue.Empty:
                return arrays, samples
