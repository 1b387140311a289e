"""The state of a simulation: samples, groups with clocks of their own, and engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class SimulatedSample:
    """Stands for one sample of a step, the ``place``-th of its batch, of ``length`` tokens.

    It is sampled from weights of ``version`` or newer.
    """

    step: int
    place: int
    prompt: tuple[int, int]
    length: float
    version: int
    engine: int = 0
    unscored: int = 0


@dataclass(slots=True)
class SimulatedBatch:
    """Keeps how far the batch of a step is, and when it was ``requested``, all ``generated`` and all ``scored``.

    ``delivered``: places of the samples that the driver has; ``unsampled`` and ``unscored``: how many are not yet.
    """

    samples: list[SimulatedSample]
    requested: float
    unsampled: int
    unscored: int
    delivered: set[int] = field(default_factory=set)
    generated: float = 0.0
    scored: float = 0.0


class GroupClock:
    """Keeps a group's own time, which passes while the group works, and what happens in it.

    ``share``: the part of that time in which its device works; ``slowness``: how many times as long it takes now as on
    a device of its own.
    """

    def __init__(self, device: str, n_workers: int, share: float = 1.0) -> None:
        self.device, self.n_workers, self.share = device, n_workers, share
        self.now, self.worked, self.busy, self.paused = 0.0, 0.0, 0, False
        self.worked_at, self.slowness = [0.0], 1.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []

    def advance(self, seconds: float) -> None:
        """Let so much of the group's time pass."""
        self.now += seconds
        self.worked += seconds * self.busy / self.n_workers


class EngineClock:
    """Keeps what one engine samples, from weights of ``version``.

    ``at``: the group's time at which ``tokens`` a running sequence were done.
    """

    def __init__(self) -> None:
        self.held = self.version = 0
        self.waiting: deque[SimulatedSample] = deque()
        self.running: list[tuple[float, int, SimulatedSample]] = []
        self.tokens, self.at, self.planned = 0.0, 0.0, 0
