"""``engines.json``: what each engine has to do, written as the driver hands requests out; the monitor shows it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class EngineQueue:
    """One engine: ``health`` as :class:`gkd.cluster.health.fleet.Health` names it, and its requests."""

    rank: int
    health: str
    sampling: int
    scoring: int


@dataclass(frozen=True, slots=True)
class Queues:
    """All engines, of ``slots`` requests each, and how many requests wait for one of them; ``time`` as time.time."""

    time: float
    waiting: int
    slots: int
    engines: Sequence[EngineQueue]


class QueueFile:
    """Writes the queues into ``file``, once a second at most. Nothing depends on it: what fails is left out."""

    def __init__(self, file: Path) -> None:
        self._file, self._written_s = file, float("-inf")

    def write_if_due(self, queues: Callable[[], Queues]) -> None:
        """Write what ``queues`` gives, if it is time."""
        now = time.monotonic()
        if now - self._written_s < EVERY_S:
            return
        self._written_s = now
        temporary = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(asdict(queues())), encoding="utf-8")
            temporary.replace(self._file)
        except OSError:  # what must be written warns of a full disk
            with suppress(OSError):  # as of a server that does not answer
                temporary.unlink()
