"""Which engines and replicas work, which are gone, and which come back: the one place for it."""

from __future__ import annotations

from collections import Counter
from enum import Enum, auto


class Health(Enum):
    """Condition of an engine or a replica of a scorer."""

    HEALTHY = auto()
    """It works."""
    SUSPECT = auto()
    """It has work and has not shown for a while that it does it: it is given no more where others are healthy."""
    DEAD = auto()
    """Its process is gone, or was ended because it hung."""
    RESTARTING = auto()
    """A new process is starting in its place."""
    STALE = auto()
    """The new process is there and has yet to get what it works with: the current weights, its clients."""
    RETIRED = auto()
    """It does not come back."""


class HealthEvent(Enum):
    """An event that changes the health of an engine or a replica."""

    SILENT = auto()
    ANSWERED = auto()
    DIED = auto()
    RESTARTED = auto()
    STARTED = auto()
    READY = auto()
    """It has what it works with: one whole push for an engine."""
    GIVEN_UP = auto()


WORKING = (Health.HEALTHY, Health.SUSPECT)
PRESENT = (*WORKING, Health.STALE)
"""Those whose process answers."""

NEXT: dict[tuple[Health, HealthEvent], Health] = {
    (Health.HEALTHY, HealthEvent.SILENT): Health.SUSPECT,
    (Health.SUSPECT, HealthEvent.ANSWERED): Health.HEALTHY,
    (Health.HEALTHY, HealthEvent.DIED): Health.DEAD,
    (Health.SUSPECT, HealthEvent.DIED): Health.DEAD,
    (Health.RESTARTING, HealthEvent.DIED): Health.DEAD,
    (Health.STALE, HealthEvent.DIED): Health.DEAD,
    (Health.DEAD, HealthEvent.RESTARTED): Health.RESTARTING,
    (Health.RESTARTING, HealthEvent.STARTED): Health.STALE,
    (Health.STALE, HealthEvent.READY): Health.HEALTHY,
    (Health.HEALTHY, HealthEvent.READY): Health.HEALTHY,
    (Health.SUSPECT, HealthEvent.READY): Health.HEALTHY,
    (Health.DEAD, HealthEvent.GIVEN_UP): Health.RETIRED,
}
"""Whatever is not here cannot happen. From DEAD the only way back to work is a new process that was made READY."""


class Fleet:
    """The engines of a run or the replicas of a model, by number, each :attr:`Health.HEALTHY` at first.

    ``name``: what they are called together, for messages.
    """

    def __init__(self, name: str, n: int) -> None:
        self.name = name
        self._health = dict.fromkeys(range(n), Health.HEALTHY)
        self._restarts: Counter[int] = Counter()

    @property
    def working(self) -> list[int]:
        """The members that do their work."""
        return self.members(*WORKING)

    @property
    def present(self) -> list[int]:
        """The members whose process is there, those included that have yet to get what they work with."""
        return self.members(*PRESENT)

    @property
    def absent(self) -> list[int]:
        """The members whose process is gone, those included that are being started again."""
        return self.members(*(health for health in Health if health not in PRESENT))

    def change(self, member: int, change: HealthEvent) -> Health:
        """Return what a member is after ``change``. Raises ValueError for what cannot happen to it."""
        before = self._health[member]
        if (before, change) not in NEXT:
            raise ValueError(f"{self.name} {member} is {before.name}, to which {change.name} cannot happen")
        self._restarts[member] += change is HealthEvent.RESTARTED
        self._health[member] = NEXT[before, change]
        return NEXT[before, change]

    def health(self, member: int) -> Health:
        """Return what a member is."""
        return self._health[member]

    def members(self, *which: Health) -> list[int]:
        """Return the members that are one of ``which``, in order."""
        return [member for member, health in self._health.items() if health in which]

    def restarts(self, member: int) -> int:
        """Return how often a member was started again."""
        return self._restarts[member]
