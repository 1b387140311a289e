"""How a batch is divided, over ranks and within a rank into micro-batches, and what its updates leave."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gkd.modeling.layout import PackSize
from gkd.types import TrainingSample

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


class SampleLength(NamedTuple):
    """Of ``n_tokens`` tokens the first ``n_prompt`` are those of ``prompt_id``, and computed once for its samples."""

    n_tokens: int
    prompt_id: int = 0
    n_prompt: int = 0


def measure_lengths(samples: Sequence[TrainingSample], shared: bool) -> list[SampleLength]:
    """Return what the samples are long, with ``shared`` also what each has in common with others of its prompt.

    That is nothing where nothing was sampled, as in :func:`gkd.actor.collate.collate`.
    """
    return [
        SampleLength(s.n_tokens, s.prompt_id, s.versions[0].start if shared and s.n_sampled else 0) for s in samples
    ]


def balance_over_ranks(lengths: Sequence[SampleLength], n_ranks: int) -> list[list[int]]:
    """Return indices of the samples each rank gets, their tokens as equal as longest-first assignment makes them.

    Samples of a prompt that is computed once stay together, or are in as many parts as leave the busiest rank least.
    """
    groups = _group_by_prompt(lengths, range(len(lengths)))
    sizes = [max(map(len, groups), default=1)]
    while sizes[-1] > 1:
        sizes.append(math.ceil(sizes[-1] / 2))
    _, shares = min((_assign(lengths, groups, size, n_ranks) for size in sizes), key=lambda assignment: assignment[0])
    return shares


def _assign(
    lengths: Sequence[SampleLength], groups: Sequence[Sequence[int]], most: int, n_ranks: int
) -> tuple[int, list[list[int]]]:
    """Return the ranks' shares of groups in parts of at most ``most`` samples, after the tokens of the busiest."""
    parts = [group[i : i + most] for group in groups for i in range(0, len(group), most)]
    prompts = [lengths[part[0]].n_prompt for part in parts]
    sizes = [
        n_prompt + sum([lengths[i].n_tokens - lengths[i].n_prompt for i in part])
        for part, n_prompt in zip(parts, prompts, strict=True)
    ]
    shares: list[list[int]] = [[] for _ in range(n_ranks)]
    loads = [(0, rank) for rank in range(n_ranks)]  # a heap
    computed, placed = [0] * n_ranks, set[tuple[int, int]]()
    for number in sorted(range(len(parts)), key=lambda i: -sizes[i]):
        load, rank = loads[0]
        shares[rank] += parts[number]
        heapq.heapreplace(loads, (load + sizes[number], rank))
        prompt = rank, lengths[parts[number][0]].prompt_id
        computed[rank] += sizes[number] - (prompts[number] if prompt in placed else 0)
        if prompts[number]:
            placed.add(prompt)
    return max(computed), shares


def _group_by_prompt(lengths: Sequence[SampleLength], order: Iterable[int]) -> list[list[int]]:
    """Return samples in groups that have their prompt in common, as they come first in ``order``."""
    groups: dict[Hashable, list[int]] = {}
    for index in order:
        groups.setdefault(lengths[index].prompt_id if lengths[index].n_prompt else (index,), []).append(index)
    return list(groups.values())


def pack(lengths: Sequence[SampleLength], budget: int, padded: bool = False) -> list[list[int]]:
    """Return micro-batches of at most ``budget`` tokens, first-fit decreasing, prompt by prompt.

    With ``padded`` each sample of one counts as many tokens as its longest, and samples of a prompt, whose lengths
    differ, are kept together only where that saves more tokens than it pads. A sample longer than the budget is a
    micro-batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i].n_tokens)
    groups = _group_by_prompt(lengths, order)
    packs = _fill_in_order(lengths, itertools.chain.from_iterable(groups), budget, padded)
    if not padded or len(groups) == len(order):
        return packs

    def count_computed(parts: list[list[int]]) -> int:
        return sum([count_tokens(part, lengths) + count_tokens(part, lengths, padded) for part in parts])

    return min(packs, _fill_in_order(lengths, order, budget, padded), key=count_computed)


def _fill_in_order(lengths: Sequence[SampleLength], order: Iterable[int], budget: int, padded: bool) -> list[list[int]]:
    """Put samples in this order into the first micro-batch that has room, of those of its prompt the latest first."""
    bins: list[list[int]] = []
    sizes: list[PackSize] = []
    longest: list[int] = []  # of each micro-batch
    latest: dict[int, int] = {}  # micro-batch with samples of a prompt

    def has_room(index: int, number: int) -> bool:
        if padded:
            return (len(bins[number]) + 1) * max(longest[number], lengths[index].n_tokens) <= budget
        return sizes[number].has_room(budget, *lengths[index])

    for index in order:
        n_tokens, prompt_id, n_prompt = lengths[index]
        numbers = itertools.chain([latest[prompt_id]] if n_prompt and prompt_id in latest else [], range(len(bins)))
        number = next((candidate for candidate in numbers if has_room(index, candidate)), len(bins))
        if number == len(bins):
            bins.append([])
            sizes.append(PackSize())
            longest.append(0)
        bins[number].append(index)
        longest[number] = max(longest[number], n_tokens)
        sizes[number].add(*lengths[index])
        if n_prompt:
            latest[prompt_id] = number
    return bins


def fits_in_pack(part: Sequence[int], lengths: Sequence[SampleLength], budget: int) -> bool:
    """Return whether :func:`pack` has one micro-batch of ``part``, indices into ``lengths``, or none of no samples."""
    if len(part) < 2 or sum([lengths[i].n_tokens for i in part]) <= budget:
        return True
    return _measure(part, lengths).fits(budget)


def count_tokens(part: Sequence[int], lengths: Sequence[SampleLength], padded: bool = False) -> int:
    """Return the tokens that a micro-batch is computed with, padding included; ``part``: indices into ``lengths``."""
    if padded:
        return len(part) * max((lengths[i].n_tokens for i in part), default=0)
    return _measure(part, lengths).n_tokens


def _measure(part: Sequence[int], lengths: Sequence[SampleLength]) -> PackSize:
    size = PackSize()
    for index in part:
        size.add(*lengths[index])
    return size
