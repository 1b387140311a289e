"""The student as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gkd.actor.loading import load
from gkd.actor.pretrained import write_config, write_weights
from tests.data.models import save_model


@pytest.mark.parametrize("settings", [{"temperature": 0.6, "do_sample": False, "eos_token_id": [1, 2]}, None])
def test_settings_of_generation_are_written_as_they_were(settings: dict[str, object] | None, tmp_path: Path) -> None:
    """transformers reads some, of published models, that it refuses to write: at the end of a run."""
    source, target = save_model(tmp_path / "source"), tmp_path / "target"
    file = source / "generation_config.json"
    file.unlink() if settings is None else file.write_text(json.dumps(settings))
    student = load(source)
    target.mkdir()
    write_config(str(source), torch.float32, target)
    write_weights(student.file_tensors(torch.float32), target)
    assert settings is None or json.loads((target / file.name).read_text()) == settings
    read = AutoModelForCausalLM.from_pretrained(target)
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), student.lm.parameters(), strict=True))
