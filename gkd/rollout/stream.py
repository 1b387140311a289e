"""What one engine sends, taken as it comes: no wait for one engine ever keeps the samples of another."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from typing import Any

import ray

from gkd.types import GenerationNotice, TrainingSample

GET_TIMEOUT_S = 30.0
"""For what is on this node already."""


class SampleStream:
    """Ray's generator ``items`` of what an engine has finished: a list of ScoredSample, one of TrainingSample, again.

    The second list is a few numbers a sample and comes with the message that it is there, unless it is large and of
    another node: then the stream :attr:`is_late` until it has come as well. What is generated and not scored yet may be
    announced in it.
    """

    def __init__(self, items: Any) -> None:
        self.items = items
        """What ``ray.wait`` is to wait for before :meth:`take`, unless the stream is late."""
        self._arrays: Any = None  # reference to ScoredSamples whose TrainingSamples have not come
        self._late: Future[list[TrainingSample | GenerationNotice]] | None = None  # those, on their way

    @property
    def is_late(self) -> bool:
        """Whether samples are on their way; :meth:`take` is then to be called without anything to wait for."""
        return self._late is not None

    def take(self) -> list[TrainingSample | GenerationNotice]:
        """Return what the engine has finished, often nothing yet; never waits.

        The arrays come first, so that samples are whole ones. Raises what ended the stream, or StopIteration.
        """
        if self._late is not None:
            return self._complete(self._late.result()) if self._late.done() else []
        try:
            item = next(self.items)
        except StopIteration:
            if self._arrays is not None:
                ray.get(self._arrays, timeout=GET_TIMEOUT_S)  # not arrays, but what ended the stream
            raise
        if self._arrays is None:
            self._arrays = item
            return []
        if ray.wait([item], timeout=0, fetch_local=True)[0]:
            return self._complete(ray.get(item, timeout=GET_TIMEOUT_S))
        self._late = item.future()
        return []

    def _complete(self, samples: list[TrainingSample | GenerationNotice]) -> list[TrainingSample | GenerationNotice]:
        arrays, self._arrays, self._late = self._arrays, None, None
        slots = count()
        return [
            sample if isinstance(sample, GenerationNotice) else replace(sample, ref=arrays, slot=next(slots))
            for sample in samples
        ]
