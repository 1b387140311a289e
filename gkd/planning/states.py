"""Layers that keep a state instead of keys and values, as a model's config.json states them.

Linear attention, Mamba 2 and short convolutions: a state has one size, however long the sequence is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gkd.modeling.architecture import STATES, TOKENWISE

LARGEST = 1 << 40  # far beyond any number of a model's

# As transformers names them, as config.json files did before, and the letters of Nemotron-H's list.
_STATE = {*STATES, "mamba", "mamba2", "M"}
_NO_ATTENTION = (_STATE - {"hybrid"}) | {*TOKENWISE, "-", "E"}
_LISTS = ("layer_types", "layers_block_type", "hybrid_override_pattern")
_ATTENDING = ("full_attn_idxs", "attn_layer_indices")  # the numbers of the layers with attention: LFM2, Bamba
_DELTA_NET = (
    "linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
_KIMI = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
_MAMBA2 = (
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
)
"""What families call heads, size of a head, size of its state, groups, and width of the convolution."""
_IN_FLOAT32 = {"nemotron_h"}  # where config.json does not state otherwise (vllm.model_executor.models.config)


@dataclass(frozen=True, slots=True)
class States:
    """Counts the layers that keep a state, and those without attention; by default none.

    ``n_latest``: numbers of a state in the model's type, the latest inputs of a convolution; ``n_summed``: those that
    all tokens are summed up in, which are in ``in_float32`` or in that type too. A layer may have attention beside it.
    """

    n_layers: int = 0
    n_without_attention: int = 0
    n_latest: int = 0
    n_summed: int = 0
    in_float32: bool = False

    def layer_bytes(self, c: int) -> int:
        """Return the bytes of a layer's state, of a model whose numbers have ``c``."""
        return c * self.n_latest + (4 if self.in_float32 else c) * self.n_summed


NO_STATES = States()


def layer_kinds(config: Mapping[str, Any]) -> list[str] | None:
    """Return the kinds of a model's layers as its config.json lists them, None where it lists none."""
    kinds = next((kinds for name in _LISTS if isinstance(kinds := config.get(name), list | str) and kinds), None)
    return None if kinds is None else [str(kind) for kind in kinds]


def read_states(config: Mapping[str, Any], kind: str, n_layers: int) -> States:
    """Read the states of a model of type ``kind``, none where it has none or their size is not known."""
    config = {**config, **_read_nested(config.get("linear_attn_config"))}
    n_states, n_without = _count_layers(config, kind, n_layers)
    n_latest, n_summed = _count_numbers(config)
    if not n_states:
        return States(0, n_without) if n_without < n_layers else NO_STATES
    if not n_latest + n_summed:
        return NO_STATES
    stated = config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype")
    wide = stated == "float32" if stated else kind in _IN_FLOAT32 or _read_counts(config, _KIMI) is not None
    return States(n_states, n_without, n_latest, n_summed, wide)


def _read_nested(entries: Any) -> dict[str, Any]:
    """Return the entries of a part of a config.json, as Kimi Linear's authors wrote it, by transformers' names."""
    if not isinstance(entries, Mapping):
        return {}
    listed = (("linear_attention", "kda_layers"), ("full_attention", "full_attn_layers"))
    kinds = [kind for kind, name in listed if isinstance(entries.get(name), list) for _ in entries[name]]
    names = zip(_KIMI, ("num_heads", "head_dim", "short_conv_kernel_size"), strict=True)
    return {"layer_types": kinds, **{name: entries.get(key) for name, key in names}}


def _count_layers(config: Mapping[str, Any], kind: str, n_layers: int) -> tuple[int, int]:
    """Count the layers with a state, and those without attention."""
    if kinds := layer_kinds(config):
        kinds = kinds[:n_layers]
        return sum(layer in _STATE for layer in kinds), sum(layer in _NO_ATTENTION for layer in kinds)
    if kind == "falcon_h1":  # has both in every layer
        return n_layers, 0
    attending = next((indices for name in _ATTENDING if isinstance(indices := config.get(name), list)), None)
    every = config.get("full_attention_interval")
    if attending is not None:
        n_attending = len({i for i in attending if type(i) is int and 0 <= i < n_layers})
    else:
        n_attending = n_layers // every if type(every) is int and every > 0 else n_layers
    return n_layers - n_attending, n_layers - n_attending


def _count_numbers(config: Mapping[str, Any]) -> tuple[int, int]:
    """Count a layer's numbers as vLLM keeps them (vllm.model_executor.layers.mamba.mamba_utils)."""
    if (sizes := _read_counts(config, _DELTA_NET)) is not None:
        n_keys, key, n_values, value, kernel = sizes
        return (2 * n_keys * key + n_values * value) * (kernel - 1), n_values * value * key
    if (sizes := _read_counts(config, _KIMI)) is not None:
        n_heads, head, kernel = sizes
        return 3 * n_heads * head * (kernel - 1), n_heads * head * head
    for names in _MAMBA2:
        if (sizes := _read_counts(config, names)) is not None:
            n_heads, head, state, n_groups, kernel = sizes
            return (n_heads * head + 2 * n_groups * state) * (kernel - 1), n_heads * head * state
    width = "conv_dim" if "conv_dim" in config else "hidden_size"
    kernel, channels = _read_counts(config, ("conv_L_cache", width)) or (1, 0)
    return (kernel - 1) * channels, 0


def _read_counts(config: Mapping[str, Any], names: tuple[str, ...]) -> list[int] | None:
    sizes = [config.get(name) for name in names]
    counts = [size for size in sizes if type(size) is int and 0 < size < LARGEST]
    return counts if len(counts) == len(names) else None
