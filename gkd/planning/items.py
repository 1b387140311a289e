"""What memory is used for, item by item, against what there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """One GPU of a group at its worst moment (of a CPU: one worker). All in bytes.

    ``items`` by name, in the order they are shown; ``available``: what the card has for them. ``lack`` says what does
    not fit where that is not the sum. ``notes``: what is worth knowing, such as how many sequences a cache holds.
    ``host``: what is in the host's memory for this GPU.
    """

    group: str
    n_gpus: int
    items: Mapping[str, float]
    available: float
    lack: str = ""
    notes: tuple[str, ...] = ()
    host: float = 0.0

    @property
    def total(self) -> float:
        """All items."""
        return sum(self.items.values())

    @property
    def margin(self) -> float:
        """What is left, negative where it does not fit."""
        return self.available - self.total

    @property
    def fits(self) -> bool:
        """Whether it does."""
        return self.margin >= 0 and not self.lack
