"""Layers that keep a state instead of keys and values, as a model's config.json states them.

Linear attention, Mamba and short convolutions: a state has one size, however long the sequence is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_STATE = {"linear_attention", "mamba", "mamba2", "conv", "hybrid", "M"}
_NO_ATTENTION = {"linear_attention", "mamba", "mamba2", "conv", "M", "mlp", "moe", "-", "E"}
_LISTS = ("layer_types", "layers_block_type", "hybrid_override_pattern")  # the last of Nemotron-H, a letter each
_DELTA_NET = (
    "linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
_MAMBA2 = (
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
)
"""What families call heads, size of a head, size of its state, groups, and width of the convolution."""
_IN_FLOAT32 = {"nemotron_h"}  # where config.json does not state otherwise (vllm.model_executor.models.config)


@dataclass(frozen=True, slots=True)
class States:
    """Counts the layers that keep a state of ``numbers`` numbers, and those without attention; by default none.

    Numbers of the model's type: one in float32 counts as two. A layer may have both, a state and attention.
    """

    numbers: int = 0
    n_layers: int = 0
    n_without_attention: int = 0


NO_STATES = States()


def layer_kinds(config: Mapping[str, Any]) -> list[str] | None:
    """Return the kinds of a model's layers as its config.json lists them, None where it lists none."""
    kinds = next((kinds for name in _LISTS if isinstance(kinds := config.get(name), list | str) and kinds), None)
    return None if kinds is None else [str(kind) for kind in kinds]


def read_states(config: Mapping[str, Any], kind: str, n_layers: int) -> States:
    """Read the states of a model of type ``kind``, none where it has none or their size is not known."""
    numbers = _count_numbers(config, kind)
    kinds = layer_kinds(config) or []
    if not kinds and type(every := config.get("full_attention_interval")) is int and every > 0:
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(n_layers)]
    if not kinds and kind == "falcon_h1":
        kinds = ["hybrid"] * n_layers
    kinds = kinds[:n_layers]
    n_states = sum(own in _STATE for own in kinds)
    if n_states and not numbers:
        return NO_STATES
    return States(numbers if n_states else 0, n_states, sum(own in _NO_ATTENTION for own in kinds))


def _count_numbers(config: Mapping[str, Any], kind: str) -> int:
    """Count the numbers of a layer's state as vLLM keeps it (vllm.model_executor.layers.mamba.mamba_utils)."""
    wide = config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype") or (kind in _IN_FLOAT32 and "float32")
    factor = 2 if wide == "float32" else 1
    if (sizes := _read_counts(config, _DELTA_NET)) is not None:
        n_keys, key, n_values, value, kernel = sizes
        return (2 * n_keys * key + n_values * value) * (kernel - 1) + factor * n_values * value * key
    for names in _MAMBA2:
        if (sizes := _read_counts(config, names)) is not None:
            n_heads, head, state, n_groups, kernel = sizes
            return (n_heads * head + 2 * n_groups * state) * (kernel - 1) + factor * n_heads * head * state
    width = "conv_dim" if "conv_dim" in config else "hidden_size"
    kernel, channels = _read_counts(config, ("conv_L_cache", width)) or (1, 0)
    return (kernel - 1) * channels


def _read_counts(config: Mapping[str, Any], names: tuple[str, ...]) -> list[int] | None:
    sizes = [config.get(name) for name in names]
    counts = [size for size in sizes if type(size) is int and size > 0]
    return counts if len(counts) == len(names) else None
