"""Attention over sequences laid end to end, plugged into any Hugging Face model that takes an attention function.

Each token attends to the earlier tokens of its own sequence alone, so packing changes nothing but speed.
Shapes: H query heads, G key-value heads, L tokens, D head size, S sequences, M longest sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "gkd_packed"
ASIDE = "gkd_packed_aside"
WIDEST_HEAD, HEAD_STEP = 256, 8  # what flash attention's kernels take
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
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each of the S sequences of ``cu_seq_lens_q`` [S + 1].

    query [1, H, L, D], key and value [1, G, L, D], values of some models narrower (MLA); returns [1, L, H, D] with the
    values' D, and no weights. Raises ValueError for attention variants it does not compute, a mask of the model's own
    among them (Doge adds one to its scores).
    """
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if attention_mask is not None:
        unsupported.append("attention_mask")
    if unsupported or cu_seq_lens_q is None or max_length_q is None:
        raise ValueError(f"packed attention lacks sequence bounds or does not compute {unsupported}")
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and kernel_takes(query, value):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return _variable_length(q, k, v, scaling, sliding_window, cu_seq_lens_q, max_length_q)[None], None
    return _attend_padded(query[0], key[0], value[0], scaling, sliding_window, cu_seq_lens_q, max_length_q)[None], None


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
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None, cu: Tensor, longest: int
) -> Tensor:
    """Run flash attention's kernel for sequences of any lengths: q [L, H, D], k and v [L, G, D] -> [L, H, D].

    It has one width for all three, so narrower values are padded with zeros, which come out as zeros.
    """
    from torch.nn.attention.varlen import varlen_attn

    bounds = (-1 if window is None else window - 1, 0)
    grouped: dict[str, Any] = (
        {"enable_gqa": True} if q.shape[1] != k.shape[1] and _takes_enable_gqa(varlen_attn) else {}
    )
    width = v.shape[-1]
    wide = v if width == q.shape[-1] else pad(v, (0, q.shape[-1] - width))
    out = varlen_attn(q, k, wide, cu, cu, longest, longest, scale=scale, window_size=bounds, **grouped)
    assert isinstance(out, Tensor)
    return out[..., :width]


@cache
def _takes_enable_gqa(function: Callable[..., Any]) -> bool:
    """Return whether fewer key-value than query heads are to be announced: torch 2.13 requires it, 2.11 has no such
    argument and takes them as they are.
    """
    return "enable_gqa" in inspect.signature(function).parameters


def _attend_padded(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None, cu: Tensor, longest: int
) -> Tensor:
    """Pad inside the attention only, without a variable-length kernel: sequences of a micro-batch are of like length.

    q [H, L, D], k and v [G, L, D] -> [L, H, D]. Padding is on the right, which a causal mask never looks at.
    """
    padding = _padding_of(cu, longest)
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
    """Places of the tokens of S sequences among S rows of M; worked out once for all layers.

    ``index`` [S * M]: the token at each place of the rows, any where there is none; ``places`` [L]: that of each token.
    Both are None where all sequences are of M tokens.
    """

    def __init__(self, cu: Tensor, longest: int) -> None:
        self.longest = longest
        self.index: Tensor | None = None
        self.places: Tensor | None = None
        lengths = cu.diff().long()
        if bool((lengths == longest).all()):
            return
        steps = torch.arange(longest, device=cu.device)
        self.places = (steps < lengths[:, None]).flatten().nonzero()[:, 0]
        self.index = (cu[:-1, None].long() + steps).clamp(max=len(self.places) - 1).flatten()

    def add(self, x: Tensor) -> Tensor:
        """Turn tokens [H, L, D] into rows [S, H, M, D]."""
        rows = x.transpose(0, 1).flatten(1)  # [L, H * D]
        if self.index is not None:
            rows = _Pad.apply(rows, self.index, self.places)  # type: ignore[no-untyped-call]
        return rows.reshape(-1, self.longest, len(x), x.shape[-1]).transpose(1, 2)

    def remove(self, rows: Tensor) -> Tensor:
        """Turn rows [S, H, M, D] into tokens [L, H, D]."""
        tokens = rows.transpose(1, 2).flatten(0, 1)  # [S * M, H, D]
        return tokens if self.places is None else tokens.index_select(0, self.places)


class _Pad(torch.autograd.Function):
    """Takes rows by an index whose other rows are padding, without a gradient; so its backward pass takes them too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, places: Tensor) -> Tensor:
        ctx.places = places
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return slope.index_select(0, ctx.places), None, None


@lru_cache(maxsize=1)  # tensors are keys by what they are, not by what they hold
def _padding_of(cu: Tensor, longest: int) -> _Padding:
    """Return the padding of sequences that begin at ``cu``, the same for every layer that is given the same tensor."""
    return _Padding(cu, longest)


AttentionInterface.register(NAME, packed_attention)


class _UncompiledAttention:
    """The attention of compiled layers: not compiled itself, and its bounds do not go through the layers.

    Both change with every micro-batch, for which every layer would be compiled again. ``bounds`` [S + 1] and
    ``longest`` stay until the next micro-batch, as checkpointing computes layers once more in the backward pass.
    """

    bounds: Tensor | None = None
    longest: int = 0

    def register(self) -> None:
        """Make it known to transformers by :data:`ASIDE`. Only where something is compiled: it imports the compiler."""
        disable: Any = torch.compiler.disable
        whole = disable(self.compute, reason="its shapes change with every micro-batch")
        AttentionInterface.register(ASIDE, whole)

    def compute(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute :func:`packed_attention` with the bounds that were put aside."""
        kwargs |= {"cu_seq_lens_q": self.bounds, "max_length_q": self.longest}
        return packed_attention(module, query, key, value, *args, **kwargs)


aside = _UncompiledAttention()
