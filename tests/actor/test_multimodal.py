"""Students that see images as well, of which a run trains the model of text: what has adapters, what is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from gkd.actor.loading import load
from gkd.actor.pretrained import write_pretrained
from gkd.config import Lora
from tests.data.models import word_tokenizer
from tests.families import SHAPE

PROCESSOR = {
    "preprocessor_config.json": {"image_processor_type": "Gemma3ImageProcessor"},
    "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
}


def make_with_images() -> Gemma3ForConditionalGeneration:
    """Make a small Gemma 3 with its tower for images."""
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
           "image_size": 28, "patch_size": 14}  # fmt: skip
    text = SHAPE | {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=90)
    return Gemma3ForConditionalGeneration(config)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The files of one, as they are published."""
    make_with_images().save_pretrained(tmp_path / "base")
    word_tokenizer().save_pretrained(tmp_path / "base")
    for name, content in PROCESSOR.items():
        (tmp_path / "base" / name).write_text(json.dumps(content))
    return tmp_path / "base"


def test_what_is_written_has_all_that_images_need(path: Path) -> None:
    out = path.with_name("out")
    write_pretrained(load(path), str(path), Lora(), torch.float32, out, writes=True)
    assert {name: json.loads((out / name).read_text()) for name in PROCESSOR} == PROCESSOR
    read, written = (load_file(directory / "model.safetensors") for directory in (path, out))
    assert read.keys() == written.keys() and all(torch.equal(written[name], value) for name, value in read.items())
    assert type(AutoModelForCausalLM.from_pretrained(out)) is Gemma3ForConditionalGeneration


def test_no_layer_for_images_has_an_adapter(path: Path) -> None:
    adapted = {name.partition(".lora_")[0] for name, _ in load(path, lora=Lora(r=2)).adapter_tensors()}
    assert len(adapted) == 2 * 7 and all(name.startswith("model.language_model.layers.") for name in adapted)
