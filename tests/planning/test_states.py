"""Layers that keep a state, and numbers by other names, as config.json files have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gkd.planning.memory.cache import cache_use, kv_bytes
from gkd.planning.shapes import ModelShape, shape_of
from gkd.planning.states import NO_STATES, States, read_states
from gkd.planning.stored import read_shape

DELTA_NET = {
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
DECODER = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": 4,
           "head_dim": 256, "vocab_size": 1000}  # fmt: skip
STATE = (2 * 16 * 128 + 32 * 128) * 3 + 32 * 128 * 128


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, (3, 3)),
        ({"layers_block_type": ["mamba", "moe", "attention", "mlp"]}, (1, 3)),
        ({"hybrid_override_pattern": "M-*E"}, (1, 3)),
        ({"full_attention_interval": 2}, (2, 2)),
        ({"layer_types": ["hybrid", "mamba", "mamba", "hybrid"]}, (4, 2)),
        ({"layer_types": ["linear_attention"] * 9}, (4, 4)),  # of more than there are
        ({"layer_types": ["full_attention"] * 4, "full_attention_interval": 2}, None),
        ({"layer_types": None}, None),
        ({"layer_types": [1, None, {}, []]}, None),
        ({}, None),
    ],
)
def test_layers_with_a_state_are_counted_however_they_are_listed(
    entries: dict[str, Any], expected: tuple[int, int] | None
) -> None:
    states = read_states(DELTA_NET | entries, "other", 4)
    assert states == (NO_STATES if expected is None else States(STATE, *expected))


@pytest.mark.parametrize("damage", [None, 0, -1, "4", True])
def test_a_state_whose_size_is_not_known_is_counted_as_keys_and_values(damage: object) -> None:
    config = DECODER | DELTA_NET | {"linear_conv_kernel_dim": damage, "layer_types": ["linear_attention"] * 2}
    shape = shape_of(config | {"model_type": "other"})
    assert shape.states == NO_STATES and (shape.n_layers, shape.n_attending) == (2, 2)


def test_numbers_in_float32_count_as_two() -> None:
    config = DELTA_NET | {"layer_types": ["linear_attention"]}
    assert read_states(config | {"mamba_ssm_dtype": "float32"}, "other", 1).numbers == STATE + 32 * 128 * 128
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 3,
             "layers_block_type": ["mamba"]}  # fmt: skip
    assert read_states(mamba, "nemotron_h", 1).numbers == (4 * 8 + 2 * 2 * 16) * 2 + 2 * 4 * 8 * 16
    assert read_states(mamba | {"mamba_ssm_cache_dtype": "float16"}, "nemotron_h", 1).numbers == 96 * 2 + 512


def qwen3_5(layers: int = 32) -> ModelShape:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * (layers // 4)
    return shape_of(DECODER | DELTA_NET | {"model_type": "qwen3_5_text", "layer_types": kinds})


def test_a_sequence_of_a_hybrid_takes_a_state_and_what_its_attention_caches() -> None:
    """Of Qwen3.5-9B's layers: at 4,096 tokens 160 MiB, where every layer's keys and values would be 512."""
    shape = qwen3_5()
    assert (shape.n_layers, shape.n_attending, shape.states.n_layers) == (32, 8, 24)
    block = 272  # tokens, of which 268 take what a state takes
    a_block = block * 8 * 2 * 2 * 4 * 256
    use = cache_use(shape, 1, 2, 4096, 8192)
    assert use.first == use.further == a_block * (-(-4096 // block) + 3)
    assert 0.3 < use.further / (4096 * kv_bytes(shape, 1, 2)) < 0.33
    assert shape.mean_context(4096) == (8 * 4096 + 24 * STATE / (2 * 4 * 256)) / 32


@pytest.mark.parametrize("family", ["nemotron_h", "opt", "ernie4_5_moe"])
def test_numbers_by_other_names_are_read(family: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[family]()
    config.save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path), "model.path")
    assert shape.n_layers == config.num_hidden_layers and shape.hidden == config.hidden_size
    if family == "opt":
        assert shape.widest_mlp == config.ffn_dim != config.hidden_size
    if family == "ernie4_5_moe":
        assert shape.layers[0].experts is not None and shape.layers[0].experts.per_token == config.moe_k
