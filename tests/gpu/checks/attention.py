"""Packed attention in bfloat16 against padded attention in float32, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gkd.modeling import attention
from tests.gpu.checks.context import Context, require, use_gpu

# Query heads, key-value heads, head size, window, head size of values
SHAPES = (
    (14, 2, 64, None, 64),
    (14, 2, 64, 100, 64),
    (4, 4, 16, None, 16),
    (16, 8, 128, None, 128),
    (16, 8, 128, 33, 128),
    (16, 16, 192, None, 128),  # latent attention, as of DeepSeek-V3
)
LENGTHS, SHORT = (1, 700, 37, 512, 3, 260), (1, 120, 37)
MOST = 2e-2  # relative, of bfloat16


def packed_against_padded(context: Context) -> None:
    """On the GPU: the kernel for sequences of any lengths; in a rehearsal what stands for it, on short ones."""
    with use_gpu(context.rehearsal):
        for shape in SHAPES:
            worst = difference(*shape, "cuda", SHORT if context.rehearsal else LENGTHS)
            context.note({"H{}_G{}_D{}_window{}_E{}".format(*shape): worst})
            require(worst < MOST, f"{shape}: differs by {worst:.2e}")


def difference(
    heads: int, groups: int, size: int, window: int | None, value_size: int, device: str, lengths: Sequence[int]
) -> float:
    """The largest relative difference of output and gradients, each |a - b| / |b|; NaN counts as infinite."""
    torch.manual_seed(0)
    cu = torch.tensor((0, *lengths), device=device).cumsum(0).int()
    shapes = ((heads, size), (groups, size), (groups, value_size))
    rounded = [torch.randn(1, h, int(cu[-1]), d, device=device).bfloat16() for h, d in shapes]
    gradient = torch.randn(1, int(cu[-1]), heads, value_size, device=device).bfloat16()
    packed = _with_gradients([x.clone() for x in rounded], gradient, window, cu, max(lengths))
    exact = _with_gradients([x.float() for x in rounded], gradient.float(), window, cu, max(lengths))
    result = [float((a.float() - b).norm() / b.norm()) for a, b in zip(packed, exact, strict=True)]
    return max(value if value == value else float("inf") for value in result)


def _with_gradients(qkv: list[Tensor], gradient: Tensor, window: int | None, cu: Tensor, longest: int) -> list[Tensor]:
    """Output and the gradients of query, key and value. In float32 the packed function pads, on a GPU too."""
    for x in qkv:
        x.requires_grad_()
    out, _ = attention.packed_attention(
        torch.nn.Module(), *qkv, None, sliding_window=window, cu_seq_lens_q=cu, max_length_q=longest
    )
    out.backward(gradient)
    return [out.detach(), *(x.grad for x in qkv if x.grad is not None)]
