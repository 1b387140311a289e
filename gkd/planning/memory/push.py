"""Memory of a push of new weights on the GPUs at both ends, as the class of the transfer counts it."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from gkd.config import TRANSFERS
from gkd.config.device import PushLoad
from gkd.errors import ConfigError, describe_error, one_line
from gkd.planning.layout import F32, Layout
from gkd.planning.memory.actor import adapter_weights
from gkd.planning.shapes import Layers, Weight
from gkd.planning.transfer import transfer_of


def count_sent_bytes(layout: Layout) -> float:
    """Return the bytes of an actor rank's GPU that a push takes beside what is there between two updates."""
    return _require_bytes(layout, "count_sent_bytes", 1)


def count_received_bytes(layout: Layout, width: int) -> float:
    """Return the bytes of the GPU of an engine of ``width`` GPUs that a push takes beside the engine's model."""
    return _require_bytes(layout, "count_received_bytes", width)


def push_load(layout: Layout, width: int) -> PushLoad:
    """Return the bytes of a push to engines of ``width`` GPUs; an adapter alone is loaded into memory that is there."""
    shape, c, config = layout.models.student, layout.compute_bytes, layout.config
    bucket, parts = float(config.weights.bucket_mb << 20), adapter_weights(shape, config.actor.lora)
    if config.weights.adapter_only:
        total, largest = sum(n * w.size for n, w in parts), max((w.size for _, w in parts), default=0)
        return PushLoad(c * total, bucket, 0.0, c * largest, c * largest, (c + F32) * largest, 0.0, 0.0, width)
    sent = max(w.size / _count_pieces(kind, w) for kind in shape.layers for w in kind.weights)
    # All experts of a layer are there while they are named one by one. What an adapter adds, and the sum, are float32.
    experts = max(_count_largest_module(shape.hidden, kind) if kind.experts else 0 for kind in shape.layers)
    adapted = max((a.cols * b.rows for (_, a), (_, b) in zip(parts[::2], parts[1::2], strict=True)), default=0)
    return PushLoad(
        total=float(c * shape.n_parameters),
        bucket=bucket,
        root=float(c * shape.head),
        tensor=c * sent,
        whole=float(c * shape.largest_matrix),
        gathered=float(max(c * shape.largest_matrix, c * experts, (c + 2 * F32) * adapted)),
        layer=float(c * shape.largest_layer),
        module=float(c * max(_count_largest_module(shape.hidden, kind) for kind in shape.layers)),
        width=width,
    )


def _count_pieces(kind: Layers, weight: Weight) -> int:
    """Count the tensors that a weight is sent as: one for each expert."""
    return kind.experts.count if kind.experts is not None and weight.share < 1 else 1


def _count_largest_module(hidden: int, kind: Layers) -> int:
    """Count the numbers of a layer's largest module in vLLM: all its experts, or gate and up projection."""
    if kind.experts is not None:
        return sum(w.size for w in kind.weights if w.share < 1)
    return 2 * hidden * kind.width


def _require_bytes(layout: Layout, method: str, width: int) -> float:
    """Return what a method of the transfer's class counts. Raises ConfigError for anything but a number of bytes."""
    transfer = TRANSFERS.load(transfer_of(layout))
    what = f"{transfer.__name__}.{method}()"
    try:  # of a class of the user's, anything
        n_bytes: Any = getattr(transfer, method)(push_load(layout, width))
    except Exception as error:
        raise ConfigError(f"weights.transfer: {what} raises {describe_error(error)}") from error
    if not (isinstance(n_bytes, Real) and 0 <= float(n_bytes) < math.inf):
        raise ConfigError(f"weights.transfer: {what} is to return bytes, and returns {one_line(repr(n_bytes))}")
    return float(n_bytes)
