"""Which engine gets which request, and when: pure bookkeeping, without Ray."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from gkd.types import SampleRequest


class RequestDispatcher:
    """Keeps what waits and what each of ``engines`` is at work on.

    Each samples at most ``capacity`` requests at a time; what it has generated, and is being scored, takes no place. It
    is given none that is to be sampled from newer weights than it has (:attr:`versions`).
    Requests go out in the order of their ``order``, then of their keys. All samples of a prompt go to one engine, which
    computes the prompt once for all of them, unless that engine has ``spill`` requests more than the emptiest one.
    ``spill`` None: they are scored together and never part, and the last of them may be more than ``capacity``.
    ``apart``: those of different orders are never sampled at the same time, by any engine, so that the numbers of the
    ones, which depend on what is computed beside them, do not depend on the others.
    """

    def __init__(self, engines: Iterable[int], capacity: int, spill: int | None, apart: bool = False) -> None:
        self.capacity, self.spill, self.apart = capacity, spill, apart
        self._sampled: Counter[float] = Counter()  # requests that engines have and have not generated, by order
        self.at_work: dict[int, dict[int, SampleRequest]] = {engine: {} for engine in engines}
        self.versions: dict[int, int] = dict.fromkeys(self.at_work, 0)
        """Of the weights that each engine has."""
        self._generated: dict[int, set[int]] = {engine: set() for engine in self.at_work}  # keys, while they are scored
        self._waiting: list[tuple[float, int, SampleRequest]] = []
        self._homes: dict[int, int] = {}  # engine by prompt, while samples of it are unfinished
        self._unfinished: Counter[int] = Counter()  # samples by prompt

    def __len__(self) -> int:
        """Return how many requests are unfinished."""
        return len(self._waiting) + sum(map(len, self.at_work.values()))

    @property
    def n_waiting(self) -> int:
        """Return how many requests no engine has yet."""
        return len(self._waiting)

    def add(self, requests: Sequence[SampleRequest]) -> None:
        """Queue requests, whose keys are all different."""
        for request in requests:
            self._unfinished[request.prompt.id] += 1
            heapq.heappush(self._waiting, (request.order, request.key, request))

    def hand_out(self, without: Collection[int] = ()) -> dict[int, list[SampleRequest]]:
        """Fill the free places of the engines, those ``without`` excepted; return what each is to be given now."""
        by_engine: dict[int, list[SampleRequest]] = {}
        loads = {engine: self.load(engine) for engine in self.at_work} if self._waiting else {}
        by_load = [(load, engine) for engine, load in loads.items() if engine not in without]
        heapq.heapify(by_load)
        while self._waiting and by_load:
            load, emptiest = by_load[0]
            if load < loads[emptiest]:  # it was given something as the home of a prompt
                heapq.heapreplace(by_load, (loads[emptiest], emptiest))
                continue
            order, key, request = self._waiting[0]
            if self.versions[emptiest] < request.version:  # it is to get weights first
                heapq.heappop(by_load)
                continue
            if load >= self.capacity or (self.apart and self._sampled and order not in self._sampled):
                break
            heapq.heappop(self._waiting)
            self._sampled[order] += 1
            engine = self._engine_for(request, emptiest, loads, without)
            self.at_work[engine][key] = request
            loads[engine] += 1
            by_engine.setdefault(engine, []).append(request)
        return by_engine

    def load(self, engine: int) -> int:
        """Return how many requests an engine has that it has not generated."""
        return len(self.at_work[engine]) - len(self._generated[engine])

    def is_drained(self, engine: int) -> bool:
        """Return whether ``engine`` samples nothing, and is given nothing before it has newer weights.

        Requests go out in their order: one for older weights may come back behind the one that newer weights are for.
        """
        if engine not in self.at_work:
            return True
        return not self.load(engine) and (not self._waiting or self._waiting[0][2].version > self.versions[engine])

    def _engine_for(
        self, request: SampleRequest, emptiest: int, loads: Mapping[int, int], without: Collection[int]
    ) -> int:
        home = self._homes.get(request.prompt.id, emptiest)
        if home not in loads or self.versions[home] < request.version:
            home = emptiest
        if self.spill is not None:
            full = min(self.capacity, loads[emptiest] + self.spill)
            home = emptiest if home in without or loads[home] >= full else home
        self._homes[request.prompt.id] = home
        return home

    def mark_generated(self, engine: int, key: int) -> None:
        """Note that ``engine`` has generated a request, which is scored now: its place is free."""
        if key in self.at_work.get(engine, ()) and key not in self._generated[engine]:
            self._generated[engine].add(key)
            order = self.at_work[engine][key].order
            self._sampled[order] -= 1
            if not self._sampled[order]:
                del self._sampled[order]

    def finish(self, engine: int, key: int) -> bool:
        """Note that ``engine`` has finished a request; False where it was not at work on it."""
        self.mark_generated(engine, key)
        request = self.at_work.get(engine, {}).pop(key, None)
        if request is None:
            return False
        self._generated[engine].discard(key)
        self._unfinished[request.prompt.id] -= 1
        if not self._unfinished[request.prompt.id]:
            del self._unfinished[request.prompt.id]
            self._homes.pop(request.prompt.id, None)
        return True

    def join(self, engine: int, version: int = 0) -> None:
        """Take an engine in, unless it is, which has weights of ``version``."""
        self.at_work.setdefault(engine, {})
        self._generated.setdefault(engine, set())
        self.versions[engine] = version

    def remove(self, engine: int) -> None:
        """Take an engine out, if it is in; what it was at work on waits again, in its old place."""
        for key in self.at_work.get(engine, ()):
            self.mark_generated(engine, key)  # as far as what may be sampled beside others is concerned
        self._generated.pop(engine, None)
        self.versions.pop(engine, None)
        for request in self.at_work.pop(engine, {}).values():
            heapq.heappush(self._waiting, (request.order, request.key, request))
