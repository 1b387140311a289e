"""What one engine sends, taken as it comes: no wait for one engine ever keeps the records of another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from gkd.types import Record

GET_TIMEOUT_S = 1.0
"""Records are a few numbers and come with the message that they are there; large ones, of another node, come later."""


class RecordStream:
    """Ray's ``generator`` of what an engine has finished: a list of samples, then that of their records, and again."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._samples: Any = None  # which have come, and their records have not
        self._records: Any = None  # which have come on their node

    @property
    def awaited(self) -> Any:
        """What ``ray.wait`` is to wait for before :meth:`take`."""
        return self._generator if self._records is None else self._records

    def take(self) -> list[Record]:
        """Records of what the engine has finished, with references to the samples; often none yet.

        The samples come first, so that records are of whole ones. Raises what ended the stream, or StopIteration.
        """
        if self._records is None and not self._take_item():
            return []
        try:
            records = ray.get(self._records, timeout=GET_TIMEOUT_S)
        except GetTimeoutError:  # still on the way
            return []
        samples, self._samples, self._records = self._samples, None, None
        return [replace(record, ref=samples) for record in records]

    def _take_item(self) -> bool:
        """Take the next item; returns whether it is that of the records."""
        try:
            item = next(self._generator)
        except StopIteration:
            if self._samples is not None:
                ray.get(self._samples, timeout=GET_TIMEOUT_S)  # not samples, but what ended the stream
            raise
        if self._samples is None:
            self._samples = item
            return False
        self._records = item
        return True
