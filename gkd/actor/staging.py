"""Copies of one rank's state for checkpoints, each of a whole step, without waiting for what the rank is doing."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch.optim import Optimizer

from gkd.actor.batches import AppliedUpdate, Metrics
from gkd.actor.state import Part, make_empty_part, part_of, write_part
from gkd.durable import Checksum
from gkd.errors import RunFailed


class Staging:
    """Notes which step the weights are of, and copies them.

    ``applied`` is None in the middle of a step, of which ``rows`` are done. :meth:`begin` and :meth:`end` are called
    by the thread that trains, around every optimizer step; :meth:`copy` and :meth:`write` by any other. What a rank
    holds that is not to write (``writes``) another one has, too.
    """

    def __init__(self, device: torch.device, writes: bool = True) -> None:
        self.device, self.writes = device, writes
        self.applied: AppliedUpdate | None = None
        self.rows: tuple[Metrics, ...] = ()
        self.updated: torch.cuda.Event | None = None
        """Recorded when the weights were last changed, for copies on another stream."""
        self._part: Part | None = None
        self._writes = threading.Lock()
        self._is_frozen = False

    def begin(self) -> None:
        """Note that weights are about to change. Raises RunFailed after :meth:`freeze`."""
        if self._is_frozen:
            raise RunFailed("the weights of this rank were handed on: they are not to change any more")
        self.applied = None

    def freeze(self) -> None:
        """Have the weights stay as they are, also where the gradient of another step comes."""
        self._is_frozen = True

    def end(self, step: int, row: Metrics, final: bool) -> None:
        """Note that they are those after an update of ``step``, the ``final`` one or not, with the metrics ``row``."""
        rows = (*self.rows, row)
        self.set(AppliedUpdate(step, rows) if final else None, () if final else rows)

    def set(self, applied: AppliedUpdate | None, rows: tuple[Metrics, ...] = ()) -> None:
        """Note that the weights are now others."""
        if self.device.type == "cuda":
            self.updated = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.updated.record()
        self.applied, self.rows = applied, rows

    def copy(self, optimizer: Optimizer) -> AppliedUpdate | None:
        """Copy what the rank holds, for :meth:`write`; returns the step it is of.

        None, and nothing is copied, in the middle of a step.
        """
        if (applied := self.applied) is None:
            return None
        part = part_of(optimizer, self.device, self.updated) if self.writes else make_empty_part(optimizer)
        if self.applied is not applied:  # an update came in between
            return None
        self._part = part
        return applied

    def write(self, optimizer: Optimizer, file: Path) -> Checksum:
        """Write the copy. Raises RunFailed when that fails, or while an earlier copy is still being written."""
        if not self._writes.acquire(blocking=False):
            raise RunFailed(f"an earlier checkpoint is still being written, instead of {file}")
        try:
            part, self._part = self._part, None
            if part is None:
                raise RunFailed(f"there is no copy to be written to {file}")
            return write_part(optimizer, part, file)
        finally:
            self._writes.release()
