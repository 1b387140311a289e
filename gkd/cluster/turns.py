"""Taking turns on GPUs that the actor shares with engines and that do not hold both: whoever works has the memory.

Engines sample and judge; the actor learns; weights go over while the actor and the sampling engines' weights are there.
Every group asks for its turn before it works, so nobody has to remember whose it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

SLACK_S = 10.0
"""More than its workers have is waited for a group, so that they name what they wait for."""


class Resident(Protocol):
    """A group whose memory can leave its GPUs and come back."""

    def give_back(self) -> None:
        """Leave the GPUs to others, without losing anything. Nothing may be under way."""

    def take_back(self) -> None:
        """Be as before."""


class Sampling(Resident, Protocol):
    """A group that is given new weights."""

    def take_back(self, weights_only: bool = False) -> None:
        """Be as before; ``weights_only``: as far as new weights need."""


@dataclass
class Turns:
    """Whose turn it is. Without members everyone always has a turn: where groups have memory of their own."""

    actor: Resident | None = None
    sampling: Sequence[Sampling] = ()
    """What samples and is on the actor's GPUs."""
    judging: Sequence[Resident] = ()
    """What judges and is on the actor's GPUs."""
    _now: Literal["engines", "actor", "push"] = field(default="engines", init=False)

    def for_engines(self) -> None:
        """Engines are about to work."""
        if self.actor is None or self._now == "engines":
            return
        self.actor.give_back()
        for group in (*self.sampling, *self.judging):
            group.take_back()
        self._now = "engines"

    def for_actor(self) -> None:
        """The actor is about to work."""
        if self.actor is None or self._now == "actor":
            return
        for group in (*self.sampling, *(self.judging if self._now == "engines" else ())):
            group.give_back()
        if self._now == "engines":
            self.actor.take_back()
        self._now = "actor"

    def for_push(self) -> None:
        """Weights are about to go from the actor to what samples."""
        if self.actor is None or self._now == "push":
            return
        self.for_actor()
        for group in self.sampling:
            group.take_back(weights_only=True)
        self._now = "push"
