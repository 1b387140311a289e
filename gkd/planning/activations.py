"""Bytes that a forward pass keeps for its backward pass, by what autograd saves of every operation.

Nothing here is fitted. Widths: H hidden, I feed-forward, h and g query and key-value heads, D head size. ``c`` is the
size in bytes of a number of the type that is computed in (4 on a CPU, 2 in bfloat16). A norm works in float32 whatever
that is. tests/planning/test_actor_memory.py measures the same in real updates.
"""

from __future__ import annotations

from dataclasses import dataclass

from gkd.planning.shape import Layers, ModelShape

F32 = 4


@dataclass(frozen=True, slots=True)
class Saved:
    """Bytes a token that are kept: by each layer of every kind (``layers``, aligned with the shape's), and outside."""

    layers: tuple[float, ...]
    outside: float


def saved(shape: ModelShape, c: int, lora_r: int = 0) -> Saved:
    """What a forward pass without gradient checkpointing keeps.

    With an adapter of rank ``lora_r`` norms are frozen and keep less, and every adapted matrix keeps r numbers more.
    """
    rope = 0 if shape.kind == "gpt2" else 2 * shape.head_dim * c
    # The final norm and its result; ids and positions are int64, one each.
    outside = _norm(shape, shape.hidden, c, lora_r > 0) + c * shape.hidden + rope + 16
    return Saved(tuple(_layer(shape, kind, c, lora_r) for kind in shape.layers), outside)


def _layer(shape: ModelShape, layers: Layers, c: int, lora_r: int) -> float:
    frozen = lora_r > 0
    adapters = c * lora_r * sum(w.linear for w in layers.weights)
    norms = shape.norms * _norm(shape, shape.hidden, c, frozen)
    inputs = 2 * c * shape.hidden  # of the projections to queries, keys and values, and of the feed-forward part
    return norms + inputs + _attention(shape, c, frozen) + _mlp(shape, layers, c) + adapters


def _norm(shape: ModelShape, width: int, c: int, frozen: bool) -> float:
    """Of one norm over ``width`` numbers, without its result, which is the next operation's to keep.

    RMS: the input in float32 and one number a row; the normalised input, which the weight's gradient needs, in the type
    computed in (Llama) or in float32 (Gemma). LayerNorm: the input as it is, mean and deviation.
    """
    if shape.norm == "layer":
        return c * width + 2 * F32
    normalised = 0 if frozen else (F32 if shape.norm == "gemma" else c) * width
    return F32 * width + normalised + F32


def _attention(shape: ModelShape, c: int, frozen: bool) -> float:
    """Queries, keys, values and the result (which is also the last projection's input), and a logsumexp a head."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kept = float(2 * c * queries + 2 * c * keys + F32 * shape.heads)
    if shape.qk_norm:
        rows = shape.heads + shape.kv_heads
        kept += rows * _norm(shape, shape.head_dim, c, frozen)
    return kept


def _mlp(shape: ModelShape, layers: Layers, c: int) -> float:
    """Gated: gate, activated gate, up, their product. Of GELU as Python writes it: x, x / 2, tanh, 1 + tanh, result."""
    numbers = {"gated": 4, "gelu_new": 5, "gelu": 2}[shape.mlp] * layers.width
    if (experts := layers.experts) is None:
        return float(c * numbers)
    # Every expert gathers its tokens, and its result is weighed; the router's probabilities are float32.
    return c * (numbers + experts.per_token * 2 * shape.hidden) + 2 * F32 * experts.count


def backward_working(shape: ModelShape, c: int) -> float:
    """Bytes a token that the backward pass of a layer needs beside what is kept: gradients of its feed-forward part
    (both factors of the product) and of the residual stream.
    """
    return c * (2 * max(kind.width for kind in shape.layers) + shape.hidden)
