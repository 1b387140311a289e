"""Memory of a push of new weights on the GPUs at both ends, as the class of the transfer counts it."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from gkd.config import TRANSFERS
from gkd.config.device import PushLoad
from gkd.errors import ConfigError, one_line
from gkd.planning.layout import F32, Layout
from gkd.planning.memory.actor import adapter_weights
from gkd.planning.shapes import Layers
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
    bucket = float(config.weights.bucket_mb << 20)
    if config.weights.adapter_only:
        parts = adapter_weights(shape, config.actor.lora)
        total, largest = sum(n * w.size for n, w in parts), max((w.size for _, w in parts), default=0)
        return PushLoad(c * total, bucket, c * largest, (c + F32) * largest, 0.0, 0.0, 0.0, width)
    # What an adapter adds, and the sum, are float32 before anything is rounded.
    a_number = c if config.actor.lora.r is None else c + 2 * F32
    return PushLoad(
        total=float(c * shape.n_parameters),
        bucket=bucket,
        tensor=float(c * max(shape.head, shape.largest_matrix)),
        gathered=float(max(c * shape.head, a_number * shape.largest_matrix)),
        layer=float(c * shape.largest_layer),
        module=float(c * max(_count_largest_module(shape.hidden, kind) for kind in shape.layers)),
        root=float(c * shape.head),
        width=width,
    )


def _count_largest_module(hidden: int, kind: Layers) -> int:
    """Count the numbers of a layer's largest module in vLLM: all its experts, or gate and up projection."""
    if kind.experts is not None:
        return sum(w.size for w in kind.weights if w.share < 1)
    return 2 * hidden * kind.width


def _require_bytes(layout: Layout, method: str, width: int) -> float:
    """Return what a method of the transfer's class counts. Raises ConfigError for anything but a number of bytes."""
    transfer = TRANSFERS.load(transfer_of(layout))
    n_bytes: Any = getattr(transfer, method)(push_load(layout, width))  # of a class of the user's, anything
    if not (isinstance(n_bytes, Real) and 0 <= float(n_bytes) < math.inf):
        what = f"{transfer.__name__}.{method}()"
        raise ConfigError(f"weights.transfer: {what} is to return bytes, and returns {one_line(repr(n_bytes))}")
    return float(n_bytes)
