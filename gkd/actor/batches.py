"""How a batch is divided, over ranks and within a rank into micro-batches, and what its updates leave."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class AppliedUpdate:
    """Weights and optimizer state are those after all updates of ``step``, whose mini-batches' metrics are ``rows``."""

    step: int
    rows: tuple[Metrics, ...] = ()


def combine_mini_batches(rows: Sequence[Metrics]) -> Metrics:
    """Combine the metrics of a step's mini-batches, none without any: means, of names that end in ``max`` the largest.

    A mean of what each mini-batch had at most would hide the one token that the metric is for. Some may lack a name, as
    of stale tokens where they have none.
    """

    def combine(name: str) -> float:
        values = [row[name] for row in rows if name in row]
        return max(values) if name.endswith("max") else sum(values) / len(values)

    return {name: combine(name) for name in dict.fromkeys(itertools.chain.from_iterable(rows))}


def balance_over_ranks(lengths: Sequence[int], n_ranks: int) -> list[list[int]]:
    """Return indices of the sequences each rank gets, their tokens as equal as longest-first assignment makes them."""
    shares: list[list[int]] = [[] for _ in range(n_ranks)]
    loads = [(0, rank) for rank in range(n_ranks)]  # a heap
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + lengths[index], rank))
    return shares


def pack(lengths: Sequence[int], budget: int, padded: bool = False) -> list[list[int]]:
    """Return micro-batches of at most ``budget`` tokens, first-fit decreasing.

    With ``padded`` each sequence of one counts as many tokens as its longest, which comes first. A sequence longer than
    the budget is a micro-batch of its own. Neighbours are of similar length.
    """
    bins: list[list[int]] = []
    room: list[int] = []

    def count(index: int, place: int) -> int:
        return lengths[bins[place][0] if padded else index]

    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = next((b for b, free in enumerate(room) if count(index, b) <= free), None)
        if fits is None:
            bins.append([index])
            room.append(budget - lengths[index])
        else:
            bins[fits].append(index)
            room[fits] -= count(index, fits)
    return bins


def count_tokens(part: Sequence[int], lengths: Sequence[int], padded: bool) -> int:
    """Return the tokens that a micro-batch is computed with, padding included; ``part``: indices into ``lengths``."""
    own = [lengths[i] for i in part]
    return len(own) * max(own, default=0) if padded else sum(own)
