"""Layers that keep a state, and numbers by other names, as config.json files have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gkd.planning.memory.cache import block_bytes, cache_use, kv_bytes, sequence_bytes, state_bytes
from gkd.planning.shapes import ModelShape, shape_of
from gkd.planning.simulation.stages import forward_flops
from gkd.planning.states import NO_STATES, States, read_states
from gkd.planning.stored import read_shape

DELTA_NET = {
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
DECODER = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": 4,
           "head_dim": 256, "vocab_size": 1000}  # fmt: skip
LATEST, SUMMED = (2 * 16 * 128 + 32 * 128) * 3, 32 * 128 * 128


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, (3, 3)),
        ({"layers_block_type": ["mamba", "moe", "attention", "mlp"]}, (1, 3)),
        ({"layer_types": ["mamba2", "conv", "full_attention", "sliding_attention"]}, (2, 2)),
        ({"hybrid_override_pattern": "M-*E"}, (1, 3)),
        ({"full_attention_interval": 2}, (2, 2)),
        ({"full_attention_interval": 3}, (3, 3)),
        ({"full_attention_interval": 9}, (4, 4)),
        ({"full_attn_idxs": [0, 2, 2, 7, "x"]}, (2, 2)),
        ({"attn_layer_indices": [3]}, (3, 3)),
        ({"layer_types": ["hybrid", "mamba", "mamba", "hybrid"]}, (4, 2)),
        ({"layer_types": ["linear_attention"] * 9}, (4, 4)),  # of more than there are
        ({"layer_types": ["full_attention"] * 4, "full_attention_interval": 2}, None),
        ({"layer_types": ["mlp"] * 4}, None),  # which no model is
        ({"layer_types": None}, None),
        ({"layer_types": [1, None, {}, []]}, None),
        ({"full_attention_interval": 0}, None),
        ({}, None),
    ],
)
def test_layers_with_a_state_are_counted_however_they_are_listed(
    entries: dict[str, Any], expected: tuple[int, int] | None
) -> None:
    states = read_states(DELTA_NET | entries, "other", 4)
    assert states == (NO_STATES if expected is None else States(*expected, LATEST, SUMMED))


def test_layers_without_attention_need_no_state() -> None:
    assert read_states({"layer_types": ["full_attention", "mlp"]}, "other", 2) == States(0, 1)


@pytest.mark.parametrize("damage", [None, 0, -1, "4", True, 1 << 50])
def test_a_state_whose_size_is_not_known_is_counted_as_keys_and_values(damage: object) -> None:
    config = DECODER | DELTA_NET | {"linear_conv_kernel_dim": damage, "layer_types": ["linear_attention"] * 2}
    shape = shape_of(config | {"model_type": "other"})
    assert shape.states == NO_STATES and (shape.n_layers, shape.n_attending) == (2, 2)


def test_what_is_summed_up_may_be_in_float32() -> None:
    config = DELTA_NET | {"layer_types": ["linear_attention"]}
    assert read_states(config, "other", 1).layer_bytes(2) == 2 * (LATEST + SUMMED)
    wide = read_states(config | {"mamba_ssm_dtype": "float32"}, "other", 1)
    assert (wide.layer_bytes(2), wide.layer_bytes(4)) == (2 * LATEST + 4 * SUMMED, 4 * (LATEST + SUMMED))
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 3,
             "layers_block_type": ["mamba"]}  # fmt: skip
    latest, summed = (4 * 8 + 2 * 2 * 16) * 2, 4 * 8 * 16
    assert read_states(mamba, "nemotron_h", 1) == States(1, 1, latest, summed, True)
    assert read_states(mamba | {"mamba_ssm_cache_dtype": "float16"}, "nemotron_h", 1) == States(1, 1, latest, summed)


def test_short_convolutions_keep_their_latest_inputs() -> None:
    config = {"hidden_size": 2048, "conv_L_cache": 3, "full_attn_idxs": [2, 5]}
    assert read_states(config, "lfm2", 8) == States(6, 6, 2 * 2048)
    assert read_states(config | {"conv_dim": 1024}, "lfm2", 8) == States(6, 6, 2 * 1024)


def test_kimis_are_read_as_its_authors_and_as_transformers_write_them() -> None:
    """Beside latent attention, whose blocks are multiples of 128 tokens."""
    own = {"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}
    expected = States(3, 3, 3 * 32 * 128 * 3, 32 * 128 * 128, True)
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    assert read_states(own | {"layer_types": kinds}, "kimi_linear", 4) == expected
    nested = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 32, "head_dim": 128}
    nested |= {"short_conv_kernel_size": 4}
    assert read_states({"linear_attn_config": nested}, "kimi_linear", 4) == expected
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 4, "layer_types": kinds}
    shape = shape_of(DECODER | own | latent | {"model_type": "kimi_linear"})
    block = 128 * -(-expected.layer_bytes(2) // (128 * 2 * 576))
    assert cache_use(shape, 1, 2, block + 1, 8192).further == block * 2 * 576 * (2 + 3)


@pytest.mark.parametrize("n_layers", [1 << 39, 10])
def test_a_model_of_any_depth_is_read_at_once(n_layers: int) -> None:
    deep = DECODER | DELTA_NET | {"num_hidden_layers": n_layers, "full_attention_interval": 5, "model_type": "other"}
    assert shape_of(deep).n_attending == n_layers // 5
    assert shape_of(deep | {"model_type": "falcon_h1", "full_attention_interval": None}).n_attending == n_layers


def hybrid(kinds: list[str], **entries: Any) -> ModelShape:
    return shape_of(DECODER | DELTA_NET | {"model_type": "other", "layer_types": kinds} | entries)


def test_a_sequence_of_a_hybrid_takes_a_state_and_what_its_attention_caches() -> None:
    """Of Qwen3.5-9B's layers: at 4,096 tokens 160 MiB, where every layer's keys and values would be 512."""
    shape = hybrid((["linear_attention"] * 3 + ["full_attention"]) * 8)
    assert (shape.n_layers, shape.n_attending, shape.states.n_layers) == (32, 8, 24)
    block = 272  # tokens, of which 268 take what a state takes
    a_block = block * 8 * 2 * 2 * 4 * 256
    use = cache_use(shape, 1, 2, 4096, 8192)
    assert use.first == use.further == a_block * (-(-4096 // block) + 3)
    assert block_bytes(shape, 1, 2) == a_block
    assert 0.3 < use.further / (4096 * kv_bytes(shape, 1, 2)) < 0.33
    assert shape.mean_context(4096) == 8 * 4096 / 32
    assert state_bytes(shape, 1, 2) == 24 * 2 * (LATEST + SUMMED) == 2 * state_bytes(shape, 2, 2)
    assert sequence_bytes(shape, 1, 2, 1000) == 1000 * kv_bytes(shape, 1, 2) / 4 + state_bytes(shape, 1, 2)
    assert forward_flops(shape, 0) == 2 * shape.n_active + 6 * 24 * SUMMED


def test_layers_without_attention_or_with_both_are_counted_as_such() -> None:
    """Nemotron-H's feed-forward layers cache nothing, Falcon-H1's layers twice."""
    mixed = hybrid(["mamba", "mlp", "full_attention", "mlp"])
    assert (mixed.n_attending, mixed.mean_context(100), state_bytes(mixed, 1, 2)) == (1, 25.0, 2 * (LATEST + SUMMED))
    both = hybrid(["hybrid"] * 2)
    assert (both.n_attending, both.mean_context(100)) == (2, 100.0)
    assert cache_use(both, 1, 2, 272, 1).further == 2 * 272 * kv_bytes(both, 1, 2)


def test_windows_beside_states_end_where_a_sequence_does() -> None:
    shape = hybrid(["sliding_attention", "linear_attention", "full_attention"], sliding_window=8)
    assert (shape.mean_context(5), shape.mean_context(50)) == (10 / 3, 58 / 3)


def test_blocks_of_a_model_without_states_are_those_that_are_given() -> None:
    shape, lengths = hybrid(["full_attention"] * 2), [1, 17, 100]
    assert [cache_use(shape, 1, 2, n, 1, block=1).further // kv_bytes(shape, 1, 2) for n in lengths] == lengths


@pytest.mark.parametrize(
    ("family", "entries"),
    [("nemotron_h", {}), ("opt", {}), ("ernie4_5_moe", {}), ("gpt_bigcode", {"n_inner": 3072}), ("falcon", {})],
)
def test_numbers_by_other_names_are_read(family: str, entries: dict[str, Any], tmp_path: Path) -> None:
    config = CONFIG_MAPPING[family](**entries)
    config.save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path), "model.path")
    assert shape.n_layers == config.num_hidden_layers and shape.hidden == config.hidden_size
    experts = shape.layers[0].experts
    if family == "opt":
        assert shape.widest_mlp == config.ffn_dim != config.hidden_size
    elif family == "ernie4_5_moe":
        assert experts is not None and experts.per_token == config.moe_k
    else:
        assert shape.kv_heads == (8 if family == "nemotron_h" else 1) < shape.heads == config.num_attention_heads


@pytest.mark.parametrize(
    ("name", "wrong"), [("n_heads", 0), ("n_layers", -3), ("d_model", "64"), ("ffn_dim", 1 << 60), ("moe_topk", [2])]
)
def test_a_number_by_another_name_is_one(name: str, wrong: object) -> None:
    usual = {"n_heads": "num_attention_heads", "n_layers": "num_hidden_layers", "d_model": "hidden_size",
             "ffn_dim": "intermediate_size", "moe_topk": "num_experts_per_tok"}  # fmt: skip
    config = {**DECODER, "model_type": "other", "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
    shape_of(config)
    config[name] = wrong
    shape_of(config)  # beside the usual one it is something else
    del config[usual[name]]
    with pytest.raises(ValueError, match=name):
        shape_of(config)


def test_experts_of_which_there_are_none_are_none() -> None:
    """As Granite 4's dense models state it."""
    config = {**DECODER, "model_type": "other", "num_hidden_layers": 2, "num_local_experts": 0}
    assert shape_of({**config, "num_experts_per_tok": 0}).is_dense
    with pytest.raises(ValueError, match="num_experts_per_tok"):
        shape_of({**config, "num_experts_per_tok": 0, "num_local_experts": 4})
