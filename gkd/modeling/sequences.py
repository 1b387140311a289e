"""Sequences laid end to end, as tensors: what a model below its head is given (:mod:`gkd.modeling.layout`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gkd.modeling.layout import SequenceLayout
from gkd.modeling.rows import Bounds


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """S sequences laid end to end, T tokens in all; the fields are those of :class:`SequenceLayout`."""

    token_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    key_index: Tensor | None = None
    cu_keys: Tensor | None = None

    @classmethod
    def from_layout(cls, layout: SequenceLayout) -> PackedSequences:
        """Return the tensors of ``layout``, which share its memory."""
        ids, positions, starts = map(torch.from_numpy, (layout.token_ids, layout.position_ids, layout.cu_seqlens))
        index, cu_keys = (None if a is None else torch.from_numpy(a) for a in (layout.key_index, layout.cu_keys))
        return cls(ids, positions, starts, layout.max_seqlen, index, cu_keys)

    def __len__(self) -> int:
        """Return T."""
        return len(self.token_ids)

    @property
    def bounds(self) -> Bounds:
        """Where sequences and their keys begin."""
        keys = self.cu_seqlens if self.cu_keys is None else self.cu_keys
        return Bounds(self.cu_seqlens, keys, self.max_seqlen, self.key_index)

    def to(self, move: Callable[[Tensor], Tensor]) -> PackedSequences:
        """Return the same with every tensor as ``move`` gives it back."""
        index, cu_keys = (None if tensor is None else move(tensor) for tensor in (self.key_index, self.cu_keys))
        return PackedSequences(
            move(self.token_ids), move(self.position_ids), move(self.cu_seqlens), self.max_seqlen, index, cu_keys
        )

    def pad(self, n_tokens: int) -> PackedSequences:
        """Return the same with at least ``n_tokens`` tokens: more sequences, as short as the others."""
        n_more = n_tokens - len(self)
        if n_more <= 0:
            return self
        steps = torch.arange(n_more, dtype=torch.int64, device=self.token_ids.device)
        # Computed where it is: a copy from the host would wait for all that the GPU has to do.
        numbers = torch.arange(1, -(-n_more // self.max_seqlen) + 1, dtype=self.cu_seqlens.dtype, device=steps.device)
        ends = (self.max_seqlen * numbers).clamp_(max=n_more)
        index, cu_keys = self.key_index, self.cu_keys
        if index is not None and cu_keys is not None:
            index, cu_keys = torch.cat([index, len(self) + steps]), torch.cat([cu_keys, len(index) + ends])
        return PackedSequences(
            torch.cat([self.token_ids, torch.zeros_like(steps)]),
            torch.cat([self.position_ids, steps % self.max_seqlen]),
            torch.cat([self.cu_seqlens, len(self) + ends]),
            self.max_seqlen,
            index,
            cu_keys,
        )
