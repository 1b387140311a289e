"""Parameters counted from config.json alone, against the models transformers builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from gkd.data.model_info import ModelInfo
from gkd.errors import ConfigError
from gkd.modeling.architecture import count_windowed_layers
from gkd.planning.shapes import shape_of
from gkd.planning.stored import read_shape

TINY = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", TINY),
    "llama with biases": ("LlamaConfig", TINY | {"attention_bias": True, "mlp_bias": True}),
    "llama 3.1 8b": (
        "LlamaConfig",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256},
    ),
    "qwen2": ("Qwen2Config", TINY),
    "qwen2.5 1.5b": (
        "Qwen2Config",
        {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
         "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3Config", TINY | {"head_dim": 16}),
    "qwen3 8b": (
        "Qwen3Config",
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    ),
    "mistral": ("MistralConfig", TINY),
    "gemma": ("GemmaConfig", TINY | {"head_dim": 16}),
    "gemma 2b": (
        "GemmaConfig",
        {"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18, "num_attention_heads": 8,
         "num_key_value_heads": 1, "vocab_size": 256000},
    ),
    "gemma2": ("Gemma2Config", TINY | {"head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", TINY | {"head_dim": 16}),
    "phi3": ("Phi3Config", TINY | {"pad_token_id": 0}),
    "mixtral": ("MixtralConfig", TINY | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2 moe": ("Qwen2MoeConfig", TINY | EXPERTS | {"shared_expert_intermediate_size": 40}),
    "qwen3 moe": ("Qwen3MoeConfig", TINY | EXPERTS | {"head_dim": 16}),
    "qwen3 moe, some layers dense": ("Qwen3MoeConfig", TINY | EXPERTS | {"decoder_sparse_step": 2}),
    "qwen3 30b-a3b": (
        "Qwen3MoeConfig",
        {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
         "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
         "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "gpt2": ("GPT2Config", {"n_embd": 48, "n_layer": 3, "n_head": 6, "vocab_size": 101, "n_positions": 64}),
    "gpt2 medium": ("GPT2Config", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_counted_exactly(case: str, tmp_path: Path) -> None:
    name, values = CASES[case]
    config = getattr(transformers, name)(**values)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    shape = read_shape(str(tmp_path), "model.path")
    assert shape.n_parameters == sum(p.numel() for p in model.parameters())
    assert shape.n_layers == config.num_hidden_layers
    largest = max(sum(p.numel() for p in layer.parameters()) for layer in _decoder_layers(model))
    assert shape.largest_layer == largest
    assert shape.largest_matrix == max(p.numel() for layer in _decoder_layers(model) for p in layer.parameters())
    assert not shape.note


def _decoder_layers(model: Any) -> Any:
    base = model.base_model
    return base.layers if hasattr(base, "layers") else base.h


@pytest.mark.parametrize("case", ["llama", "qwen2 moe", "gpt2"])
@pytest.mark.parametrize("world", [2, 7, 64])
def test_a_shard_has_whole_rows(case: str, world: int) -> None:
    """FSDP2 chunks the first axis of every parameter, so the first rank has the most."""
    name, values = CASES[case]
    config = getattr(transformers, name)(**values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    chunks = sum(p.chunk(world)[0].numel() for p in model.parameters())
    assert shape_of(config.to_dict()).shard_size(world) == chunks


WINDOWED: dict[str, dict[str, Any]] = {
    "cohere2": {"model_type": "cohere2"},
    "exaone4": {"model_type": "exaone4"},
    "gemma2": {"model_type": "gemma2"},
    "gemma2, a smaller one": {"model_type": "gemma2", "sliding_window": 8},
    "gemma3": {"model_type": "gemma3_text"},
    "gemma3, every second one": {"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 2},
    "gpt-oss": {"model_type": "gpt_oss", "num_local_experts": 4, "intermediate_size": 8},
    "mistral": {"model_type": "mistral"},
    "mistral without": {"model_type": "mistral", "sliding_window": None},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "mixtral with": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": 8},
    "olmo3": {"model_type": "olmo3"},
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "phi3 with": {"model_type": "phi3", "pad_token_id": 0, "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 3},
    "qwen2 with": {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 3, "use_sliding_window": True},
    "qwen2 of few layers": {"model_type": "qwen2", "use_sliding_window": True},
    "qwen3 moe with": {"model_type": "qwen3_moe", "use_sliding_window": True, **EXPERTS},
    "layer by layer": {
        "model_type": "qwen3", "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", WINDOWED)
def test_windows_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    written = TINY | {"num_hidden_layers": 8, "num_experts_per_tok": 2} | WINDOWED[case]
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = AutoConfig.from_pretrained(tmp_path)
    windows = read_shape(str(tmp_path), "model.path").windows
    n_layers = count_windowed_layers(config)
    assert (windows.n_layers, windows.tokens) == (n_layers, config.sliding_window if n_layers else 0)


def test_windows_of_an_unknown_type_are_those_that_are_stated() -> None:
    own = TINY | {"model_type": "newest", "sliding_window": 8}
    by_layer = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
    stated: tuple[dict[str, Any], ...] = (
        {},
        by_layer,
        {"sliding_window_pattern": 3},
        by_layer | {"use_sliding_window": False},
        {"layer_types": [*by_layer["layer_types"], "sliding_attention"]},  # and of one that predicts further tokens
    )
    assert [shape_of(own | more).windows.n_layers for more in stated] == [0, 2, 2, 0, 2]


def test_qwen_of_one_and_a_half_billion() -> None:
    shape = shape_of({"model_type": "qwen2"} | CASES["qwen2.5 1.5b"][1])
    assert round(shape.n_parameters / 1e9, 2) == 1.54
    assert (shape.n_layers, shape.kv_heads, shape.head_dim) == (28, 2, 128)


def test_experts_count_for_what_a_token_passes() -> None:
    shape = shape_of({"model_type": "qwen3_moe"} | CASES["qwen3 30b-a3b"][1])
    assert shape.n_parameters / 1e9 == pytest.approx(30.5, abs=0.05)
    assert (shape.n_active + shape.head) / 1e9 == pytest.approx(3.0, abs=0.1)


def test_an_unknown_type_is_said_to_be_taken_for_llama(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"model_type": "newest"}))
    assert "newest" in read_shape(str(tmp_path), "model.path").note


WRONG = {
    "a list": ("[1, 2]", "not a JSON object"),
    "nothing": ("null", "not a JSON object"),
    "cut off": ('{"model_type":', "not JSON"),
    "text for a number": (TINY | {"hidden_size": "8"}, "hidden_size is 8"),
    "a list for a number": (TINY | {"intermediate_size": [8, 8]}, r"intermediate_size is \[8, 8\]"),
    "no heads": (TINY | {"num_attention_heads": 0}, "num_attention_heads is 0"),
    "no layers": (TINY | {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "less than nothing": (TINY | {"vocab_size": -5}, "vocab_size is -5"),
    "left open": (TINY | {"vocab_size": None}, "has no vocab_size"),
    "a fraction": (TINY | {"hidden_size": 8.5}, "hidden_size is 8.5"),
    "layers": (
        {**TINY, "model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 1, "mlp_only_layers": 5},
        "mlp_only_layers is 5",
    ),
    "no number": ('{"model_type": "llama", "hidden_size": NaN}', "hidden_size is nan"),
    "beyond any model": (TINY | {"hidden_size": 10**30}, "hidden_size is 1000"),
    "text for a part": ({"text_config": "x"}, "does not describe a model"),
    "experts, and how many for a token unsaid": (TINY | {"num_experts": 4}, "has no num_experts_per_tok"),
    "more heads than numbers": (TINY | {"num_attention_heads": 99, "head_dim": None}, "hidden_size .* is less than"),
    "of another kind": ({"model_type": "mamba", "hidden_size": 8}, "mamba is not known, and it has no num_attention"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_describes_no_model_is_one_error(case: str, tmp_path: Path) -> None:
    content, message = WRONG[case]
    (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError, match=f"model.path=.*: (its )?config.json .*{message}"):
        read_shape(str(tmp_path), "model.path")


def test_the_language_model_of_one_that_sees() -> None:
    """Gemma 3's own config.json leaves out the numbers of heads."""
    config = transformers.Gemma3TextConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    text_config = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of({"model_type": "gemma3", "text_config": text_config, "vision_config": {"hidden_size": 32}})
    assert shape.n_parameters == sum(p.numel() for p in model.parameters())
    assert "language model" in shape.note


def test_experts_of_an_unknown_type_are_counted() -> None:
    """DeepSeek-V3: 671 billion parameters, of which 37 work for a token."""
    shape = shape_of(
        {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
         "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129280, "n_routed_experts": 256,
         "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "tie_word_embeddings": False}
    )  # fmt: skip
    assert shape.n_parameters / 1e9 == pytest.approx(671, rel=0.02)
    assert "deepseek_v3" in shape.note


def test_a_missing_number_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    with pytest.raises(ConfigError, match=r"model.path=.*: config.json has no num_attention_heads"):
        read_shape(str(tmp_path), "model.path")
    with pytest.raises(ConfigError, match=r"teacher\.model\.path=.*: .*\bno config\.json"):
        read_shape(str(tmp_path.parent), "teacher.model.path")
    with pytest.raises(ConfigError, match=r"model\.path=/nowhere/x: "):
        read_shape("/nowhere/x", "model.path")


@pytest.mark.parametrize(
    "rope",
    [
        {
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 512},
            "original_max_position_embeddings": 512,
        },
        {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 512},
    ],
)
def test_longrope_ends_texts_where_a_run_ends_them(rope: dict[str, Any], tmp_path: Path) -> None:
    """As config.json has it of this version of transformers and of earlier ones."""
    config = transformers.Phi3Config(**TINY, max_position_embeddings=2048, pad_token_id=0)
    one_each = [1.0] * (config.hidden_size // config.num_attention_heads // 2)
    factors = {"short_factor": one_each, "long_factor": one_each}
    rope = {name: own | factors if isinstance(own, dict) else own for name, own in rope.items()}
    written = config.to_dict()
    del written["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(written | rope))
    info = ModelInfo.read(str(tmp_path), "model.path")
    assert read_shape(str(tmp_path), "model.path").positions == info.rope_positions == 511
