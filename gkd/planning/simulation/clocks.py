"""The state of a simulation: samples, engines, groups with clocks of their own, and what happens next in any."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gkd.planning.simulation.run import Pace, SimulatedRun, slowness

EVEN = Pace()


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


class SimulationState:
    """Holds what the groups of a simulation share: the time, batches by step, and the present ``step`` of the actor."""

    def __init__(self, run: SimulatedRun) -> None:
        self.run, self.time, self.step = run, 0.0, 1
        workers = {"actor": 1, "rollout": run.sampling.n_engines} | {k: s.n_servers for k, s in run.scoring.items()}
        self.groups = {
            name: GroupClock(run.hosts.get(name, name), n, run.shares.get(name, 1.0)) for name, n in workers.items()
        }
        self.driver = GroupClock("driver", 1)
        self.batches: dict[int, SimulatedBatch] = {}
        self._clocks = [*self.groups.values(), self.driver]
        self._share_devices = len({clock.device for clock in self._clocks}) < len(self._clocks)
        self._number = 0

    @property
    def pace(self) -> Pace:
        """Of the present step."""
        return self.run.paces[self.step % len(self.run.paces)] if self.run.paces else EVEN

    def take_number(self) -> int:
        """Return a number larger than all before: what is to happen at one time happens in their order."""
        self._number += 1
        return self._number

    def advance(self) -> None:
        """Go on to the next event of any group."""
        working = [clock for clock in self._clocks if clock.busy > 0 and not clock.paused]
        if self._share_devices:
            self._slow_down(working)
        nearest: GroupClock | None = None
        dt = float("inf")
        for clock in working:
            if clock.events and (left := (clock.events[0][0] - clock.now) * clock.slowness) < dt:
                nearest, dt = clock, left
        assert nearest is not None, "somebody works until the last step has ended"
        if dt > 0:
            self.time += dt
            for clock in working:
                clock.advance(dt / clock.slowness)
        heapq.heappop(nearest.events)[2]()

    def _slow_down(self, working: Sequence[GroupClock]) -> None:
        """Have each group work as fast as those that work besides it on its devices leave it, on average over these."""
        load = dict.fromkeys((clock.device for clock in working), 0.0)
        for clock in working:
            load[clock.device] += clock.share * min(1.0, clock.busy / clock.n_workers) / self.run.at_once
        for clock in working:
            clock.slowness = slowness(clock.share, load[clock.device])

    def run_after(self, clock: GroupClock, seconds: float, action: Callable[[], None]) -> None:
        """Have ``action`` happen after so many seconds of a group's own time."""
        heapq.heappush(clock.events, (clock.now + seconds, self.take_number(), action))

    def schedule(self, seconds: float, action: Callable[[], None]) -> None:
        """Have ``action`` happen after so many seconds of the driver's, or of a message."""
        if not seconds:
            action()
            return
        self.driver.busy += 1

        def run_action() -> None:
            self.driver.busy -= 1
            action()

        self.run_after(self.driver, seconds, run_action)
