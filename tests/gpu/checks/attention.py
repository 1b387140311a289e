"""Packed attention in bfloat16 against padded attention in float32, forward and backward.

Once every sequence has its own tokens, once some begin with the same ones, which are there once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from gkd.modeling import attention
from gkd.modeling.layout import SequenceLayout
from gkd.modeling.rows import current_bounds
from gkd.modeling.sequences import PackedSequences
from tests.gpu.checks.context import Context, require, use_gpu
from tests.gpu.checks.rows import note_models_with_rows

# Query heads, key-value heads, head size, window, head size of values
SHAPES = (
    (14, 2, 64, None, 64),
    (14, 2, 64, 100, 64),
    (4, 4, 16, None, 16),
    (16, 8, 128, None, 128),
    (16, 8, 128, 33, 128),
    (16, 16, 192, None, 128),  # latent attention, as of DeepSeek-V3
)
LENGTHS, SHORT = (1, 700, 37, 512, 3, 260), (1, 120, 37, 90)
# Tokens that longer sequences begin with: once more than windows are long, so that nothing looks at many of the copies
# of their keys, whose gradients the kernel has to write all the same.
SHARED = {False: (0, 30, 250), True: (0, 30, 80)}
MOST = 2e-2  # relative, of bfloat16


def packed_against_padded(context: Context) -> None:
    """On the GPU: the kernel for sequences of any lengths; in a rehearsal what stands for it, on short ones.

    Then whole models, which have layers that it is not for (:mod:`tests.gpu.checks.rows`).
    """
    with use_gpu(context.rehearsal):
        for shape, n_shared in product(SHAPES, SHARED[context.rehearsal]):
            worst = difference(*shape, "cuda", SHORT if context.rehearsal else LENGTHS, n_shared)
            context.note({"H{}_G{}_D{}_window{}_E{}".format(*shape) + f"_shared{n_shared}" * bool(n_shared): worst})
            require(worst < MOST, f"{shape}, {n_shared} tokens in common: differs by {worst:.2e}")
        note_models_with_rows(context)


def difference(
    heads: int,
    groups: int,
    size: int,
    window: int | None,
    value_size: int,
    device: str,
    lengths: Sequence[int],
    n_shared: int = 0,
) -> float:
    """The largest relative difference of output and gradients, each |a - b| / |b|; NaN counts as infinite."""
    torch.manual_seed(0)
    sequences = [np.arange(length, dtype=np.int32) for length in lengths]
    layout = SequenceLayout(sequences, [n_shared if n_shared < length else 0 for length in lengths])
    its = PackedSequences.from_layout(layout).to(lambda tensor: tensor.to(device))
    n = len(its)
    shapes = ((heads, size), (groups, size), (groups, value_size))
    rounded = [torch.randn(1, h, n, d, device=device).bfloat16() for h, d in shapes]
    gradient = torch.randn(1, n, heads, value_size, device=device).bfloat16()
    packed = _with_gradients([x.clone() for x in rounded], gradient, window, its)
    exact = _with_gradients([x.float() for x in rounded], gradient.float(), window, its)
    result = [float((a.float() - b).norm() / b.norm()) for a, b in zip(packed, exact, strict=True)]
    return max(value if value == value else float("inf") for value in result)


def _with_gradients(qkv: list[Tensor], gradient: Tensor, window: int | None, its: PackedSequences) -> list[Tensor]:
    """Output and the gradients of query, key and value. In float32 the packed function pads, on a GPU too."""
    for x in qkv:
        x.requires_grad_()
    with current_bounds.use(its.bounds, len(its)):
        out, _ = attention.packed_attention(torch.nn.Module(), *qkv, None, sliding_window=window)
    out.backward(gradient)
    return [out.detach(), *(x.grad for x in qkv if x.grad is not None)]
