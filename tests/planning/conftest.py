"""A model that is only a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen2Config


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model"
    Qwen2Config(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True,
    ).save_pretrained(path)  # fmt: skip
    return str(path)
