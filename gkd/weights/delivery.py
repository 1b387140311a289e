"""The buckets of a push on their way: from a rank of the actor to the workers of engines, without the driver.

A rank sends each bucket as soon as it is packed and packs the next one meanwhile; two at most are not loaded yet.
An engine loads them in their order. The driver makes one call to every worker, whatever the number of buckets.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gkd.errors import RunFailed
from gkd.weights.transfer import IN_FLIGHT, Bucket


@dataclass(frozen=True, slots=True)
class Push:
    """One push: its ``number`` among all of a run, the ``version`` it brings, and the seconds that a bucket may take.

    That is longer than the driver waits, which ends an engine that hangs, so that the others go on.
    """

    number: int
    version: int
    limit_s: float


@dataclass(frozen=True, slots=True)
class Destination:
    """The ``worker`` of engine ``engine``, a handle of Ray's, and how many ranks of the actor send it a part of each
    bucket.
    """

    engine: int
    worker: Any
    n_senders: int


class Delivery:
    """Sends buckets of one rank to ``destinations``. One that died or failed gets no more; the driver reads its error.

    ``served``: the versions that engines serve, by engine, which have loaded the last bucket.
    """

    def __init__(self, push: Push, destinations: Sequence[Destination]) -> None:
        self.push = push
        self.destinations = list(destinations)
        """Those that still get buckets."""
        self.served: dict[int, int] = {}
        self.lost: dict[int, Exception] = {}
        """What came of engines that get no more."""
        self._flying: deque[tuple[Bucket, list[tuple[Destination, Any]]]] = deque()

    def send(self, bucket: Bucket) -> None:
        """Start sending a bucket."""
        calls = [(to, to.worker.load_bucket.remote(self.push, bucket, to.n_senders)) for to in self.destinations]
        self._flying.append((bucket, calls))

    def make_room(self, n: int = IN_FLIGHT - 1) -> None:
        """Wait until at most ``n`` buckets are not loaded everywhere. Raises RunFailed past the push's limit."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        while len(self._flying) > n:
            bucket, calls = self._flying[0]
            for to, call in calls:
                try:
                    served = ray.get(call, timeout=self.push.limit_s)
                    if bucket.last:
                        self.served[to.engine] = served
                except GetTimeoutError:
                    raise RunFailed(f"{bucket} was not loaded within {self.push.limit_s:g} s") from None
                except (RayError, RunFailed) as error:  # the driver has it from the engine's own answer
                    if to in self.destinations:
                        self.destinations.remove(to)
                        self.lost[to.engine] = error
            self._flying.popleft()


class Arrivals:
    """The buckets of one push at an engine, which come on several threads and are loaded in their order."""

    def __init__(self, push: Push) -> None:
        self.push = push
        self._changed = threading.Condition()
        self._parts: dict[int, list[Bucket]] = {}
        self._n_arrived = self._n_loaded = 0
        self._changed_at = time.monotonic()  # when a bucket came, or was loaded
        self._complete = False
        self._failure: BaseException | None = None

    def load(self, part: Bucket, n_senders: int, load: Callable[[Bucket], object]) -> None:
        """Have a bucket loaded by ``load`` once all its parts are here and the buckets before it are loaded.

        Returns when it is; raises what loading it, or one before it, raised.
        """
        with self._changed:
            parts = self._parts.setdefault(part.number, [])
            parts.append(part)
            whole = len(parts) == n_senders
            if whole:
                self._n_arrived, self._changed_at = self._n_arrived + 1, time.monotonic()
            self._wait(lambda: self._n_loaded >= part.number + (not whole), f"{part} to be loaded")
        if not whole:
            return
        try:
            load(replace(part, contents=tuple(content for sent in parts for content in sent.contents)))
        except BaseException as error:
            self._end(error)
            raise
        with self._changed:
            del self._parts[part.number]
            self._n_loaded, self._changed_at = self._n_loaded + 1, time.monotonic()
            self._complete = part.last
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when the last bucket is loaded. Raises what loading one of them raised, RunFailed past the limit."""
        with self._changed:
            self._wait(lambda: self._complete, f"weights version {self.push.version}")

    def progress(self) -> tuple[int, int, float]:
        """Return how many buckets have arrived, how many of these are loaded, and seconds since either changed."""
        with self._changed:
            return self._n_arrived, self._n_loaded, time.monotonic() - self._changed_at

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        """Wait with the lock. Raises the failure of a load, and RunFailed where nothing comes or is loaded in time."""
        while not until():
            if self._failure is not None:
                raise self._failure
            if (left_s := self._changed_at + self.push.limit_s - time.monotonic()) <= 0:
                raise RunFailed(f"waited {self.push.limit_s:g} s in vain for {what}")
            self._changed.wait(left_s)

    def _end(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
