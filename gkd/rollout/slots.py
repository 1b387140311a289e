"""Which slots of an engine the driver takes for occupied, and which of them hold samples that are generated."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping


class Slots:
    """Decides which generated samples are announced to the driver before they are scored.

    An engine has ``capacity`` slots; the driver gives it no more requests than it has free ones. A sample that is
    scored comes with its arrays, and frees its slot by that. One that is still being scored is worth a message only
    where the engine has no slot free, or nothing left to sample, which new weights and samples of other weights wait
    for: every method returns the keys to announce now. Of no use twice: a key is announced once. Called from the
    engine's thread and from the one that delivers.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._undelivered: dict[int, float] = {}  # orders by key
        self._occupied: set[int] = set()  # of these, those that hold slots by the driver's count
        self._generated: set[int] = set()  # of these, those being scored

    def take(self, orders: Mapping[int, float]) -> tuple[int, ...]:
        """Note new requests, by key; those of a lower order are waited for first."""
        with self._lock:
            self._undelivered |= orders
            self._occupied.update(orders)
            return self._take_announced()

    def generate(self, keys: Iterable[int]) -> tuple[int, ...]:
        """Note samples that are to be scored now."""
        with self._lock:
            self._generated.update(keys)
            return self._take_announced()

    def deliver(self, keys: Iterable[int]) -> None:
        """Note samples that go to the driver, scored."""
        delivered = set(keys)
        with self._lock:
            for key in delivered:
                self._undelivered.pop(key, None)
            self._occupied -= delivered
            self._generated -= delivered

    def may_wait(self, keys: Collection[int]) -> bool:
        """Return whether scored samples may wait for others before they are delivered.

        So it is where the driver has free slots without them, and waits for others that are not scored first, or with
        them: not for those of a higher order, as of steps that are sampled ahead.
        """
        with self._lock:
            order = max(self._undelivered[key] for key in keys)
            missing = any(other_order <= order for key, other_order in self._undelivered.items() if key not in keys)
            return missing and len(self._occupied) < self._capacity

    def _take_announced(self) -> tuple[int, ...]:
        samples_on = len(self._generated) < len(self._occupied) < self._capacity
        if samples_on or not self._generated:
            return ()
        keys = tuple(sorted(self._generated))
        self._occupied -= self._generated
        self._generated.clear()
        return keys
