"""Attention over sequences laid end to end, plugged into any Hugging Face model that takes an attention function.

Each token attends to the earlier tokens of its own sequence alone, so packing changes nothing but speed. Sequences may
have the tokens that they begin with in common (:mod:`gkd.modeling.layout`): they then have more keys than queries.
Shapes: H query heads, G key-value heads, T tokens, K keys, D head size, S sequences, M longest sequence.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from gkd.errors import one_line

log = logging.getLogger("gkd")
NAME = "gkd_packed"
ASIDE = "gkd_packed_aside"
WIDEST_HEAD, HEAD_STEP = 256, 8  # what flash attention's kernels take
ROUNDED = 0.05  # beside its result, of attention in bfloat16
# Arguments by which a model selects an attention that is not the plain one; computing without them would be wrong.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_k: int | None = None,
    shared_keys: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each of S sequences, whose tokens begin at ``cu_seq_lens_q`` [S + 1].

    query [1, H, T, D], key and value [1, G, T, D], values of some models narrower (MLA); returns [1, T, H, D] with the
    values' D, and no weights. ``max_length_k``: M. ``shared_keys``: where each sequence's keys begin [S + 1], and which
    of the T they are [K]; its tokens are the last of them. None: its tokens.
    Raises ValueError for attention variants it does not compute, a mask of the model's own among them (Doge adds one to
    its scores).
    """
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if attention_mask is not None:
        unsupported.append("attention_mask")
    if unsupported or cu_seq_lens_q is None or max_length_k is None:
        raise ValueError(f"packed attention lacks sequence bounds or does not compute {unsupported}")
    keys, key_index = (cu_seq_lens_q, None) if shared_keys is None else shared_keys
    bounds = Bounds(cu_seq_lens_q, keys, max_length_k, key_index)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and kernel_takes(query, value):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return _variable_length(q, k, v, scaling, sliding_window, bounds)[None], None
    return _attend_padded(query[0], key[0], value[0], scaling, sliding_window, bounds)[None], None


class Bounds(NamedTuple):
    """Bounds of the tokens and the keys of S sequences, [S + 1] each, the most keys of one, and which keys they have.

    ``key_index`` [K] is None where the keys of all sequences are those of its tokens.
    """

    tokens: Tensor
    keys: Tensor
    longest: int
    key_index: Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        """Return them as transformers' models hand them on to :func:`packed_attention`.

        By the names that these know bounds are those of the tokens: where a model leaves the other one out, no key is
        looked for that is not there.
        """
        bounds = {"cu_seq_lens_q": self.tokens, "cu_seq_lens_k": self.tokens}
        lengths = {"max_length_q": self.longest, "max_length_k": self.longest}
        return {**bounds, **lengths, **({} if self.key_index is None else {"shared_keys": (self.keys, self.key_index)})}


@contextmanager
def count_windows() -> Iterator[list[int]]:
    """Yield the windows that the attention of packed sequences is given meanwhile, one a call that has one."""
    windows = list[int]()
    attend = AttentionInterface()[NAME]

    def count(*args: Any, **kwargs: Any) -> Any:
        if (window := kwargs.get("sliding_window")) is not None:
            windows.append(window)
        return attend(*args, **kwargs)

    AttentionInterface.register(NAME, count)
    try:
        yield windows
    finally:
        AttentionInterface.register(NAME, attend)


def kernel_takes(query: Tensor, value: Tensor) -> bool:
    """Return whether flash attention's kernel has heads of that size; Gemma 4 has some of 512."""
    size = query.shape[-1]
    return value.shape[-1] <= size <= WIDEST_HEAD and size % HEAD_STEP == 0


def _variable_length(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None, bounds: Bounds
) -> Tensor:
    """Run flash attention's kernel for sequences of any lengths: q [T, H, D], k and v [T, G, D] -> [T, H, D].

    It has one width for all three, so narrower values are padded with zeros, which come out as zeros. Of a sequence
    with more keys than queries it takes the last query to be at the last key.
    """
    from torch.nn.attention.varlen import varlen_attn

    sides = (-1 if window is None else window - 1, 0)
    grouped: dict[str, Any] = (
        {"enable_gqa": True} if q.shape[1] != k.shape[1] and _takes_enable_gqa(varlen_attn) else {}
    )
    width, (cu_q, cu_k, longest, index) = v.shape[-1], bounds
    if index is not None:
        k, v = (_Take.apply(x, index) for x in (k, v))  # type: ignore[no-untyped-call]
    wide = v if width == q.shape[-1] else pad(v, (0, q.shape[-1] - width))
    out = varlen_attn(q, k, wide, cu_q, cu_k, longest, longest, scale=scale, window_size=sides, **grouped)
    assert isinstance(out, Tensor)
    return out[..., :width]


@cache
def can_share_beginnings(device: str) -> bool:
    """Return whether a sequence may have more keys than queries on ``device``: "cuda" or "cpu".

    Tried once: flash attention's kernel is to take the last query to be at the last key. With the first query at the
    first key a sample of a shared prompt would look at the prompt's beginning alone.
    """
    if device == "cpu":
        return True
    try:
        if (off := _measure_shared_error(device)) < ROUNDED:
            return True
        reason = f"attention with more keys than queries is off by {off:.2g}"
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = one_line(error)
    log.warning("every sample is computed with a prompt of its own: %s", reason)
    return False


@torch.no_grad()
def _measure_shared_error(device: str) -> float:
    """Return how far the kernel is from float32, beside it, for a sequence that begins with two tokens of another."""
    starts, keys = (torch.tensor(ends, dtype=torch.int32, device=device) for ends in ((0, 3, 6), (0, 3, 8)))
    bounds = Bounds(starts, keys, 5, torch.tensor([0, 1, 2, 0, 1, 3, 4, 5], device=device))
    q, k, v = torch.randn(3, 6, 2, 64, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    ours = _variable_length(q, k, v, None, None, bounds).float()
    q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))
    expected = _attend_padded(q, k, v, None, None, bounds)
    return float((ours - expected).norm() / expected.norm())


@cache
def _takes_enable_gqa(function: Callable[..., Any]) -> bool:
    """Return whether fewer key-value than query heads are to be announced: torch 2.13 requires it, 2.11 has no such
    argument and takes them as they are.
    """
    return "enable_gqa" in inspect.signature(function).parameters


class _Take(torch.autograd.Function):
    """Takes rows by an index that may have some more than once, whose gradients are added up in float32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.index, ctx.n_rows = index, len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return _add_up(slope, ctx.index, ctx.n_rows), None


def _add_up(slope: Tensor, index: Tensor, n_rows: int) -> Tensor:
    """Return the sums [n_rows, ...] of the rows that are for the same one by ``index``."""
    sums = torch.zeros(n_rows, *slope.shape[1:], dtype=torch.float32, device=slope.device)
    return sums.index_add_(0, index, slope.float()).to(slope.dtype)


def _attend_padded(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None, bounds: Bounds) -> Tensor:
    """Pad inside the attention only, without a variable-length kernel, to the longest sequence of a micro-batch.

    q [H, T, D], k and v [G, T, D] -> [T, H, D]. Padding is on the right, which a causal mask never looks at.
    """
    padding, longest = _padding_of(bounds), bounds.longest
    qs, ks, vs = (padding.add(x) for x in (q, k, v))
    mask = None
    if window is not None and window < longest:
        steps = torch.arange(longest, device=q.device)
        behind = steps[:, None] - steps
        mask = (behind >= 0) & (behind < window)
    out = scaled_dot_product_attention(
        qs, ks, vs, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[0] != k.shape[0]
    )  # [S, H, M, D]
    return padding.remove(out)


class _Padding:
    """Places of S sequences among S rows of M; worked out once for all layers.

    ``index`` [S * M]: the token at each place of the rows, any where there is none; ``keys`` [K]: the places of each
    sequence's tokens; ``places`` [T]: those of the tokens that are computed for it. All are None where all sequences
    are of M tokens of their own.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.index: Tensor | None = None
        self.keys: Tensor | None = None
        self.places: Tensor | None = None
        lengths, longest = bounds.keys.diff().long(), bounds.longest
        if bounds.key_index is None and bool((lengths == longest).all()):
            return
        steps = torch.arange(longest, device=lengths.device)
        self.keys = self.places = (steps < lengths[:, None]).flatten().nonzero()[:, 0]
        self.index = (bounds.keys[:-1, None].long() + steps).clamp(max=len(self.keys) - 1).flatten()
        if bounds.key_index is not None:
            self.index = bounds.key_index[self.index]
            n_before = lengths - bounds.tokens.diff()
            is_own = (steps < lengths[:, None]) & (steps >= n_before[:, None])
            self.places = is_own.flatten().nonzero()[:, 0]

    def add(self, x: Tensor) -> Tensor:
        """Turn tokens [H, T, D] into rows [S, H, M, D]."""
        rows = x.transpose(0, 1).flatten(1)  # [T, H * D]
        if self.index is not None:
            rows = _Pad.apply(rows, self.index, self.keys, self.bounds.key_index)  # type: ignore[no-untyped-call]
        return rows.reshape(-1, self.bounds.longest, len(x), x.shape[-1]).transpose(1, 2)

    def remove(self, rows: Tensor) -> Tensor:
        """Turn rows [S, H, M, D] into tokens [T, H, D]."""
        tokens = rows.transpose(1, 2).flatten(0, 1)  # [S * M, H, D]
        return tokens if self.places is None else tokens.index_select(0, self.places)


class _Pad(torch.autograd.Function):
    """Takes rows by an index whose other rows are padding, without a gradient; so its backward pass takes them too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, keys: Tensor, key_index: Tensor | None) -> Tensor:
        ctx.keys, ctx.key_index, ctx.n_rows = keys, key_index, len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        own = slope.index_select(0, ctx.keys)
        return own if ctx.key_index is None else _add_up(own, ctx.key_index, ctx.n_rows), None, None, None


@lru_cache(maxsize=1)  # tensors are keys by what they are, not by what they hold
def _padding_of(bounds: Bounds) -> _Padding:
    """Return the padding of sequences with these bounds, the same for every layer that is given the same tensors."""
    return _Padding(bounds)


AttentionInterface.register(NAME, packed_attention)


class _UncompiledAttention:
    """The attention of compiled layers: not compiled itself, and its bounds do not go through the layers.

    They change with every micro-batch, for which every layer would be compiled again. They stay until the next
    micro-batch, as checkpointing computes layers once more in the backward pass.
    """

    bounds: Bounds | None = None

    def register(self) -> None:
        """Make it known to transformers by :data:`ASIDE`. Only where something is compiled: it imports the compiler."""
        disable: Any = torch.compiler.disable
        whole = disable(self.compute, reason="its shapes change with every micro-batch")
        AttentionInterface.register(ASIDE, whole)

    def compute(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute :func:`packed_attention` with the bounds that were put aside."""
        assert self.bounds is not None, "sequences are laid end to end by gkd.modeling.backbone"
        return packed_attention(module, query, key, value, *args, **(kwargs | self.bounds.arguments()))


aside = _UncompiledAttention()
