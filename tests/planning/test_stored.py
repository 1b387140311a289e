"""Weights of models of types that are not known, counted as their files have them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gkd.planning.shapes import FAMILIES as KNOWN
from gkd.planning.shapes import shape_of
from gkd.planning.stored import read_shape
from tests.families import FAMILIES, make

UNKNOWN = [
    "apertus", "cohere", "deepseek_v3", "exaone4", "falcon_h1", "gemma4", "glm4", "glm4_moe", "gpt_neox", "gpt_oss",
    "granite", "granitemoehybrid", "lfm2", "nemotron", "olmo2", "olmoe", "qwen3_5", "qwen3_next", "seed_oss", "smollm3",
]  # fmt: skip


@pytest.mark.parametrize("family", UNKNOWN)
def test_every_weight_is_counted(family: str, tmp_path: Path) -> None:
    model = make(family, 0)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert config["model_type"] not in KNOWN
    shape = read_shape(str(tmp_path), "model.path")
    kept = {id(p): p.numel() for p in model.parameters()}
    beside = sum(b.numel() for name, b in model.named_buffers() if name in model.state_dict())
    assert shape.n_parameters == sum(kept.values()) + beside
    assert shape.n_layers == FAMILIES[family][1].get("num_hidden_layers", 2) and not shape.is_exact
    assert config["model_type"] in shape.note and "files" in shape.note
    assert 0 < shape.n_active < shape.n_parameters
    rows = [w.rows for kind in shape.layers for w in kind.weights if w.share < 1]
    assert set(rows) <= {4} and bool(rows) == (not shape.is_dense)


def test_what_is_no_part_of_the_language_model_is_not_counted(tmp_path: Path) -> None:
    """Nor a head that is tied, nor a layer after the last; several files are counted as one."""
    config = {"model_type": "other", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2,
              "intermediate_size": 16, "vocab_size": 10, "tie_word_embeddings": True}  # fmt: skip
    layer = {
        "self_attn.q_proj.weight": (8, 8),
        "mlp.up_proj.weight": (16, 8),
        "norm.weight": (8,),
        "conv.weight": (8, 1, 4),
    }
    first = {f"model.layers.{i}.{name}": torch.zeros(size) for i in range(3) for name, size in layer.items()}
    first |= {"model.visual.blocks.0.weight": torch.zeros(50, 8), "mtp.layers.0.mlp.weight": torch.zeros(9, 9)}
    second = {"model.embed_tokens.weight": torch.zeros(10, 8), "lm_head.weight": torch.zeros(10, 8)}
    files = {"a.safetensors": first, "b.safetensors": second}
    for name, tensors in files.items():
        save_file(tensors, tmp_path / name)
    index = {"weight_map": {key: name for name, tensors in files.items() for key in tensors}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shape = read_shape(str(tmp_path), "model.path")
    (layers,) = shape.layers
    assert (layers.count, layers.size, shape.n_root) == (2, 8 * 8 + 16 * 8 + 8 + 32, 80)
    assert [weight.name for weight in layers.weights if weight.linear] == ["mlp.up_proj", "self_attn.q_proj"]


@pytest.mark.parametrize("damage", ["none", "torn", "fewer", "quantized"])
def test_files_that_are_not_those_of_its_layers_are_left_out(damage: str, tmp_path: Path) -> None:
    make("olmo2", 0).save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text("utf-8"))
    if damage == "none":
        file.unlink()
    elif damage == "torn":
        file.write_bytes(file.read_bytes()[:100])
    elif damage == "fewer":
        config["num_hidden_layers"] = 3
    else:
        config["quantization_config"] = {"quant_method": "fp8"}
    config["layer_types"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(str(tmp_path), "model.path") == shape_of(config)
