"""Attention over sequences laid end to end, plugged into any Hugging Face model that takes an attention function.

Each token attends to the earlier tokens of its own sequence alone, so packing changes nothing but speed. Sequences may
have the tokens that they begin with in common (:mod:`gkd.modeling.layout`): they then have more keys than queries.
Shapes: H query heads, G key-value heads, T tokens, K keys, D head size, S sequences, M longest sequence.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from gkd.errors import one_line
from gkd.modeling.rows import Bounds, current_bounds, rows_of, take

log = logging.getLogger("gkd")
NAME = "gkd_packed"
IN_ROWS = "gkd_packed_in_rows"
PACKED = (NAME, IN_ROWS)
WIDEST_HEAD, HEAD_STEP = 256, 8  # what flash attention's kernels take
ROUNDED = 0.05  # beside its result, of attention in bfloat16
# Arguments by which a model selects an attention that is not the plain one; computing without them would be wrong.
_SCORES_CHANGED = ("softcap", "s_aux")  # alike for any tokens
_BIAS = "position_bias"  # other for other tokens
_UNSUPPORTED = (*_SCORES_CHANGED, _BIAS)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each of S sequences, those of :data:`current_bounds`.

    query [1, H, T, D], key and value [1, G, T, D], values of some models narrower (MLA); returns [1, T, H, D] with the
    values' D, and no weights.
    Raises ValueError without sequences, and for attention variants it does not compute, a mask of the model's own among
    them (Doge adds one to its scores).
    """
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if attention_mask is not None:
        unsupported.append("attention_mask")
    if unsupported:
        raise ValueError(f"packed attention does not compute {unsupported}")
    bounds = current_bounds.get(query.shape[2])
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and kernel_takes(query, value):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return _variable_length(q, k, v, scaling, sliding_window, bounds)[None], None
    return _attend_padded(query[0], key[0], value[0], scaling, sliding_window, bounds)[None], None


def packed_attention_in_rows(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute the same, also with soft caps and sinks: these by the family's own function over rows [S, H, M, D].

    Raises ValueError as well for a family without such a function.
    """
    eager_attention, changed = _find_eager(module), any(kwargs.get(name) is not None for name in _SCORES_CHANGED)
    if eager_attention is None or attention_mask is not None or not changed or kwargs.get(_BIAS) is not None:
        return packed_attention(module, query, key, value, attention_mask, **kwargs)
    bounds = current_bounds.get(n_tokens := query.shape[2])
    rows = rows_of(bounds, n_tokens)
    causal_mask = _make_mask(bounds.longest, kwargs.get("sliding_window"), query.device)
    mask = torch.zeros_like(causal_mask, dtype=query.dtype).masked_fill_(~causal_mask, torch.finfo(query.dtype).min)
    q, k, v = (rows.add(x[0]) for x in (query, key, value))
    out, _ = eager_attention(module, q, k, v, mask[None, None], **kwargs)  # [S, M, H, D]
    return rows.remove(out.transpose(1, 2))[None], None


def _find_eager(module: nn.Module) -> Callable[..., Any] | None:
    """Return the attention of a family in plain operations, which is in the file of its layers."""
    files = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
    return next(
        (function for file in files if (function := getattr(file, "eager_attention_forward", None)) is not None), None
    )


@contextmanager
def list_windows(name: str) -> Iterator[list[int | None]]:
    """Yield the windows that the attention ``name`` is given meanwhile, one a call, None where it has none."""
    windows = list[int | None]()
    attend = AttentionInterface()[name]

    def note(*args: Any, **kwargs: Any) -> Any:
        windows.append(kwargs.get("sliding_window"))
        return attend(*args, **kwargs)

    AttentionInterface.register(name, note)
    try:
        yield windows
    finally:
        AttentionInterface.register(name, attend)


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
        k, v = take(k, index), take(v, index)
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
    output = _variable_length(q, k, v, None, None, bounds).float()
    q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))
    expected = _attend_padded(q, k, v, None, None, bounds)
    return float((output - expected).norm() / expected.norm())


@cache
def _takes_enable_gqa(function: Callable[..., Any]) -> bool:
    """Return whether fewer key-value than query heads are to be announced: torch 2.13 requires it, 2.11 has no such
    argument and takes them as they are.
    """
    return "enable_gqa" in inspect.signature(function).parameters


def _attend_padded(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None, bounds: Bounds) -> Tensor:
    """Pad inside the attention only, without a variable-length kernel, to the longest sequence of a micro-batch.

    q [H, T, D], k and v [G, T, D] -> [T, H, D]. Padding is on the right, which a causal mask never looks at.
    """
    rows, longest = rows_of(bounds, q.shape[1]), bounds.longest
    qs, ks, vs = (rows.add(x) for x in (q, k, v))
    mask = _make_mask(longest, window, q.device) if window is not None and window < longest else None
    out = scaled_dot_product_attention(
        qs, ks, vs, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[0] != k.shape[0]
    )  # [S, H, M, D]
    return rows.remove(out)


def _make_mask(longest: int, window: int | None, device: torch.device) -> Tensor:
    """Return which keys [M] each query [M] of a row sees: those before it, with a window the nearest of them."""
    steps = torch.arange(longest, device=device)
    behind = steps[:, None] - steps
    return (behind >= 0) & (behind < (longest if window is None else window))


AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(IN_ROWS, packed_attention_in_rows)


def leave_uncompiled() -> None:
    """Keep attention out of layers that are compiled: its shapes change with every micro-batch.

    Only where something is compiled: it imports the compiler.
    """
    disable: Any = torch.compiler.disable
    AttentionInterface.register(NAME, disable(packed_attention, reason="its shapes change with every micro-batch"))
