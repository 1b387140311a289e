"""Layers that attend to a window of the tokens before, as a model's config.json states them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
LEFT_OUT: dict[str, dict[str, int]] = {
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "gemma2": {"sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {"sliding_window": 4096, "sliding_window_pattern": 6},
    "gpt_oss": {"sliding_window": 128, "sliding_window_pattern": 2},
    "mistral": {"sliding_window": 4096, "max_window_layers": 0},
    "mixtral": {"max_window_layers": 0},
    "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "phi3": {"max_window_layers": 0},
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "qwen3_moe": _QWEN | {"max_window_layers": 0},
}
"""What types of models have where config.json leaves it out (transformers' classes of configurations, vLLM's models).

Every ``sliding_window_pattern``-th layer attends to everything; without a pattern, those before ``max_window_layers``.
"""


@dataclass(frozen=True, slots=True)
class Windows:
    """Counts the layers that attend to the last ``tokens`` alone; by default there are none."""

    tokens: int = 0
    n_layers: int = 0


NO_WINDOWS = Windows()


def read_windows(config: Mapping[str, Any], kind: str, n_layers: int) -> Windows:
    """Read the windows of a model of type ``kind``; ``sliding_window`` of None states that there are none.

    A type that is not listed has those that config.json states layer by layer, or by a pattern.
    """
    entries = {**LEFT_OUT.get(kind, {}), **config}
    tokens, pattern = entries.get("sliding_window"), entries.get("sliding_window_pattern")
    if type(tokens) is not int or tokens < 1 or entries.get("use_sliding_window") is False:
        return NO_WINDOWS
    if isinstance(types := entries.get("layer_types"), list):
        n_windowed = types[:n_layers].count("sliding_attention")
    elif type(pattern) is int and pattern > 0:
        n_windowed = n_layers - n_layers // pattern
    else:
        first = entries.get("max_window_layers", n_layers)
        n_windowed = max(0, n_layers - first) if type(first) is int else 0
    return Windows(tokens, n_windowed) if n_windowed else NO_WINDOWS
