"""Colocation: GPUs that the actor shares with engines and that do not hold both.

While engines sample and score, the actor is offloaded to the host's memory; while it learns, they sleep. Weights go
over while the actor and the weights of the sampling engines are on the GPUs. Groups free and take memory one after the
other: vLLM fails where what is free on a GPU shrinks while it goes to sleep. Whoever uses a group prepares for it
first, so that no caller has to remember who is on the GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

SLACK_S = 10.0
"""More than its workers have is waited for a group, so that they name what they wait for."""


class Offloadable(Protocol):
    """The actor, whose weights and optimizer state can leave its GPUs and come back."""

    def offload(self) -> None:
        """Move everything to the host. Nothing may be under way."""

    def onload(self) -> None:
        """Move everything back."""


class Sleeper(Protocol):
    """A group of engines, whose memory can leave their GPUs and come back."""

    def sleep(self) -> None:
        """Free the GPUs without losing anything. Nothing may be under way."""

    def wake(self) -> None:
        """Compute again as before :meth:`sleep`."""


class SleepingSampler(Sleeper, Protocol):
    """A group of engines that is given new weights."""

    def wake(self, weights_only: bool = False) -> None:
        """Compute again as before :meth:`sleep`; ``weights_only``: as far as new weights need."""


@dataclass
class Colocation:
    """The groups on shared GPUs. Without an actor all always are there: where groups have memory of their own."""

    actor: Offloadable | None = None
    samplers: Sequence[SleepingSampler] = ()
    """Groups on the actor's GPUs that sample."""
    scorers: Sequence[Sleeper] = ()
    """Groups on the actor's GPUs that score."""
    _state: Literal["engines", "actor", "push"] = field(default="engines", init=False)

    def wake_engines(self) -> None:
        """Prepare for sampling and scoring."""
        if self.actor is None or self._state == "engines":
            return
        self.actor.offload()
        for group in (*self.samplers, *self.scorers):
            group.wake()
        self._state = "engines"

    def onload_actor(self) -> None:
        """Prepare for whatever the actor does."""
        if self.actor is None or self._state == "actor":
            return
        for group in (*self.samplers, *(self.scorers if self._state == "engines" else ())):
            group.sleep()
        if self._state == "engines":
            self.actor.onload()
        self._state = "actor"

    def prepare_push(self) -> None:
        """Prepare for weights that go from the actor to what samples."""
        if self.actor is None or self._state == "push":
            return
        self.onload_actor()
        for group in self.samplers:
            group.wake(weights_only=True)
        self._state = "push"
