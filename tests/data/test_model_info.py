"""What a model's weights are known by."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config

from gkd.data.model_info import PIECE_BYTES, PIECES, ModelInfo, fingerprint_weights
from tests.data.models import save_model


def test_weights_are_known_wherever_they_are(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    own = fingerprint_weights(str(model))
    moved = shutil.copytree(model, tmp_path / "moved")
    (moved / "config.json").write_text("{}")
    os.utime(moved / "model.safetensors", (0, 0))
    assert fingerprint_weights(str(moved)) == own
    tensors = load_file(moved / "model.safetensors")
    tensors["model.norm.weight"][-1] += 1
    save_file(tensors, moved / "model.safetensors", {"format": "pt"})
    assert fingerprint_weights(str(moved)) != own


def test_of_large_files_pieces_are_read(tmp_path: Path) -> None:
    """Those of 64 GB in no more time than it takes to read 256 KiB, and both ends of a layer that was trained count."""
    file, layer = tmp_path / "model.safetensors", 1 << 20
    save_file({f"layer_{n}": torch.zeros(layer) for n in range(8)}, file)
    assert file.stat().st_size > 16 * PIECES * PIECE_BYTES
    own = {fingerprint_weights(str(tmp_path))}
    for n in range(8):
        save_file({f"layer_{m}": torch.full((layer,), float(m == n)) for m in range(8)}, file)
        own.add(fingerprint_weights(str(tmp_path)))
    assert len(own) == 9
    with file.open("wb") as opened:
        opened.truncate(64 << 30)
    assert fingerprint_weights(str(tmp_path)) not in own


def test_a_model_of_several_parts_may_name_its_end_in_any_of_them(tmp_path: Path) -> None:
    for own, text, expected in (({}, {"eos_token_id": 7}, [7]), ({"eos_token_id": 1}, {"eos_token_id": 7}, [1, 7])):
        Gemma3Config(text_config={"vocab_size": 90, **text}, **own).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        assert ("eos_token_id" in config) == bool(own)
        assert sorted(ModelInfo.read(str(tmp_path), "model.path").eos_ids) == expected
