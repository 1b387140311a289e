"""Which sequences go together: over ranks in equal shares, within a rank into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence


def share(lengths: Sequence[int], n_ranks: int) -> list[list[int]]:
    """Return indices of the sequences each rank gets, their tokens as equal as longest-first assignment makes them."""
    shares: list[list[int]] = [[] for _ in range(n_ranks)]
    loads = [0] * n_ranks
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    return shares


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return micro-batches of at most ``budget`` tokens, first-fit decreasing.

    A sequence longer than the budget is a micro-batch of its own. Neighbours are of similar length.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = next((b for b, free in enumerate(room) if lengths[index] <= free), None)
        if fits is None:
            bins.append([index])
            room.append(budget - lengths[index])
        else:
            bins[fits].append(index)
            room[fits] -= lengths[index]
    return bins
