"""Sequences laid end to end, those that begin alike behind one copy of their beginning. Imports no torch.

A group of samples of one prompt is computed with the prompt once (Liu et al., "Prefix Grouper", arXiv 2506.05433):
what a layer makes of a token depends on the tokens before it alone, so it is the same in all of them. Attention, which
looks at other tokens, finds each sequence's keys by an index, and adds up their gradients.

Shapes: S sequences, T tokens that are computed, K keys: the lengths of all sequences together.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gkd.types import Array, Int32

MOST_KEYS = 2
"""Keys of a pack for each token that it may have, at most: they are copied for the attention, and kept for the backward
pass. Beside some 34 bytes for each number of a token's hidden state (Korthikanti et al., arXiv 2205.05198) its key and
value are 4 in bfloat16, and half a byte where eight query heads share them."""


@dataclass
class PackSize:
    """Counts what is computed for sequences that are laid end to end: T tokens, and K keys of attention."""

    n_tokens: int = 0
    n_keys: int = 0
    beginnings: set[Hashable] = field(default_factory=set)
    """What sequences begin with, of those that may share it."""

    def added_tokens(self, length: int, beginning: Hashable, n_shared: int) -> int:
        """Count what a sequence of ``length`` adds, whose first ``n_shared`` tokens are ``beginning``."""
        return length - n_shared if beginning in self.beginnings else length

    def has_room(self, budget: int, length: int, beginning: Hashable, n_shared: int) -> bool:
        """Return whether so long a sequence may be added to a pack of at most ``budget`` tokens."""
        n_tokens = self.n_tokens + self.added_tokens(length, beginning, n_shared)
        return n_tokens <= budget and self.might_have_room(budget, length, n_shared)

    def might_have_room(self, budget: int, length: int, n_shared: int) -> bool:
        """Return whether that would be so if what the sequence begins with were there."""
        return self.n_tokens + length - n_shared <= budget and self.n_keys + length <= MOST_KEYS * budget

    def fits(self, budget: int) -> bool:
        """Return whether a pack of at most ``budget`` tokens holds what was added."""
        return self.n_tokens <= budget and self.n_keys <= MOST_KEYS * budget

    def add(self, length: int, beginning: Hashable, n_shared: int) -> None:
        """Count one more sequence."""
        self.n_tokens += self.added_tokens(length, beginning, n_shared)
        self.n_keys += length
        if n_shared:
            self.beginnings.add(beginning)


class SequenceLayout:
    """S sequences laid end to end; of those whose first ``n_shared`` tokens are the same, all but one lack these.

    - token_ids, position_ids [T]: positions are counted from each sequence's start.
    - cu_seqlens [S + 1]: where the tokens of each sequence begin that are there for it alone, or for it first.
    - max_seqlen: the longest sequence, its beginning included.
    - key_index [K], cu_keys [S + 1]: which tokens each sequence is made of, and where those of each begin among them;
      None where every sequence has its own.

    ``n_shared``: of each sequence, fewer than it has; 0 where nothing of it may be shared.
    """

    def __init__(self, sequences: Sequence[Int32], n_shared: Sequence[int]) -> None:
        lengths = [len(ids) for ids in sequences]
        firsts: dict[bytes, int] = {}
        self._beginnings, self._own = list[int](), list[int]()  # of each sequence: where they are among the tokens
        self._skipped: list[int] = []  # of each sequence: how many of its tokens are with the first that has them
        starts = [0]
        for ids, length, n in zip(sequences, lengths, n_shared, strict=True):
            first = firsts.setdefault(ids[:n].tobytes(), starts[-1]) if n else starts[-1]
            skipped = 0 if first == starts[-1] else n
            self._beginnings.append(first)
            self._skipped.append(skipped)
            self._own.append(starts[-1] - skipped)
            starts.append(starts[-1] + length - skipped)
        pairs = list(zip(sequences, self._skipped, strict=True))
        self.token_ids = _lay([ids[skipped:] for ids, skipped in pairs])
        self.position_ids = _lay([np.arange(skipped, len(ids)) for ids, skipped in pairs])
        self.cu_seqlens = np.array(starts, np.int32)
        self.max_seqlen = max(lengths, default=1)
        self.key_index: Array | None = None
        self.cu_keys: Array | None = None
        if any(self._skipped):
            self.key_index = _lay([self.locate(i, np.arange(length)) for i, length in enumerate(lengths)])
            self.cu_keys = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)

    def locate(self, number: int, positions: Array) -> Array:
        """Return where among the T tokens those at ``positions`` of a sequence are."""
        is_shared = positions < self._skipped[number]
        return np.where(is_shared, self._beginnings[number], self._own[number]) + positions


def _lay(arrays: Sequence[Array]) -> Array:
    return np.concatenate([np.zeros(0, np.int64), *arrays])
