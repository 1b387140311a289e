"""Sequences laid end to end as padded rows, for what is computed over whole sequences, and back.

Sequences may have the tokens that they begin with in common (:mod:`gkd.modeling.layout`): each row has all of its own.
Shapes: T tokens, K keys, S sequences, M longest sequence, H heads, D what each has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Bounds(NamedTuple):
    """Bounds of the tokens and the keys of S sequences, [S + 1] each, the most keys of one, and which keys they have.

    ``key_index`` [K] is None where the keys of all sequences are those of its tokens.
    """

    tokens: Tensor
    keys: Tensor
    longest: int
    key_index: Tensor | None = None


class _CurrentBounds:
    """Bounds of the sequences that go through a model at present.

    They do not go through its layers as arguments: not every family hands on what it does not know, and compiled layers
    would be compiled again for every micro-batch. Those of a pass with gradients stay until the next such pass, as
    checkpointing computes layers once more in the backward pass: of two such passes the first one's comes before the
    second.
    """

    def __init__(self) -> None:
        self._bounds: Bounds | None = None
        self.n_tokens = 0
        """Of all of them."""

    @contextmanager
    def use(self, bounds: Bounds, n_tokens: int) -> Iterator[None]:
        """Have what is computed meanwhile be ``n_tokens`` tokens with these bounds."""
        before = self._bounds, self.n_tokens
        self._bounds, self.n_tokens = bounds, n_tokens
        try:
            yield
        finally:
            if not torch.is_grad_enabled():
                self._bounds, self.n_tokens = before

    def get(self, n_tokens: int | None = None) -> Bounds:
        """Return those of a layer that is given ``n_tokens`` tokens. Raises ValueError where it is given others."""
        if self._bounds is None or n_tokens not in (None, self.n_tokens):
            raise ValueError(f"a layer was given {n_tokens} tokens without the bounds of their sequences")
        return self._bounds


current_bounds = _CurrentBounds()


class Rows:
    """Places of S sequences among S rows of M; worked out once for all layers.

    ``index`` [S * M]: the token at each place of the rows, any where there is none; ``keys`` [K]: the places of each
    sequence's tokens; ``places`` [T]: those of the tokens that are computed for it. All are None where all sequences
    are of M tokens of their own.
    """

    def __init__(self, bounds: Bounds, n_tokens: int) -> None:
        """Compute on the device, without waiting for what it has: sizes are known here."""
        self.bounds = bounds
        self.index: Tensor | None = None
        self.keys: Tensor | None = None
        self.places: Tensor | None = None
        n_sequences, longest = len(bounds.tokens) - 1, bounds.longest
        n_keys = n_tokens if bounds.key_index is None else len(bounds.key_index)
        if bounds.key_index is None and n_keys == n_sequences * longest:
            return
        starts = longest * torch.arange(n_sequences, device=bounds.keys.device)
        self.keys = self.places = _count_up(starts, bounds.keys, n_keys)
        steps = torch.arange(longest, device=starts.device)
        self.index = (bounds.keys[:-1, None].long() + steps).clamp(max=n_keys - 1).flatten()
        if bounds.key_index is not None:
            self.index = bounds.key_index[self.index]
            n_before = bounds.keys.diff() - bounds.tokens.diff()
            self.places = _count_up(starts + n_before, bounds.tokens, n_tokens)

    def add(self, x: Tensor) -> Tensor:
        """Turn tokens [H, T, D] into rows [S, H, M, D]."""
        rows = x.transpose(0, 1).flatten(1)  # [T, H * D]
        if self.index is not None:
            rows = _Take.apply(rows, self.index, self.keys, self.bounds.key_index)  # type: ignore[no-untyped-call]
        return rows.reshape(-1, self.bounds.longest, len(x), x.shape[-1]).transpose(1, 2)

    def remove(self, rows: Tensor) -> Tensor:
        """Turn rows [S, H, M, D] into tokens [T, H, D]."""
        tokens = rows.transpose(1, 2).flatten(0, 1)  # [S * M, H, D]
        return tokens if self.places is None else tokens.index_select(0, self.places)


@lru_cache(maxsize=1)  # tensors are keys by what they are, not by what they hold
def rows_of(bounds: Bounds, n_tokens: int) -> Rows:
    """Return the padding of sequences with these bounds, the same for every layer that is given the same tensors."""
    return Rows(bounds, n_tokens)


def _count_up(starts: Tensor, bounds: Tensor, n: int) -> Tensor:
    """Count up [n] within the ``bounds`` [S + 1] of each of S sequences, from ``starts`` [S]."""
    lengths = bounds.diff().long()
    return torch.arange(n, device=starts.device) + (starts - bounds[:-1]).repeat_interleave(lengths, output_size=n)


def take(rows: Tensor, index: Tensor) -> Tensor:
    """Return rows by an index that may have some more than once, whose gradients are added up in float32."""
    selection: Tensor = _Take.apply(rows, index, None, index)  # type: ignore[no-untyped-call]
    return selection


class _Take(torch.autograd.Function):
    """Takes rows by an index of which ``grad_rows`` have a gradient, all if None; it is added to ``origins``.

    These may name a row more than once, or are None where they would be all rows in order.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, grad_rows: Tensor | None, origins: Tensor | None) -> Tensor:
        ctx.grad_rows, ctx.origins, ctx.n_rows = grad_rows, origins, len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = slope if ctx.grad_rows is None else slope.index_select(0, ctx.grad_rows)
        if ctx.origins is None:
            return gradient, None, None, None
        sums = torch.zeros(ctx.n_rows, *gradient.shape[1:], dtype=torch.float32, device=gradient.device)
        return sums.index_add_(0, ctx.origins, gradient.float()).to(gradient.dtype), None, None, None
