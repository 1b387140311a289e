"""The student as files."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gkd.actor.collate import collate
from gkd.actor.loading import load
from gkd.actor.pretrained import write_config, write_pretrained, write_weights
from gkd.config import Lora
from gkd.data.answers import template_end
from gkd.data.model_info import ModelInfo
from gkd.errors import ConfigError, StudentNotWritten
from tests.actor import models
from tests.actor.models import make
from tests.data.models import save_model
from tests.data.test_answers import chat_tokenizer
from tests.planning.tensor_bytes import TensorBytes


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


def test_the_weights_of_one_file_are_held_at_a_time(tmp_path: Path) -> None:
    """Beside them the tensor that did not fit in, and the one that is gathered next."""
    n_bytes = 4 * 25_000
    held = TensorBytes()
    with held:
        write_weights(((str(i), torch.ones(25_000)) for i in range(40)), tmp_path, 4 * n_bytes)
    assert len(list(tmp_path.glob("*.safetensors"))) == 10
    assert 4 * n_bytes <= held.peak <= 6 * n_bytes


def test_a_head_in_the_files_that_is_tied_to_another_weight_is_refused(tmp_path: Path) -> None:
    """transformers would keep it, and vLLM leave it out."""
    make("qwen2 tied").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    for head, is_other in ((embedding.clone(), False), (embedding + 1, True)):
        save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
        for lora in (None, Lora(r=2)):
            with pytest.raises(ConfigError, match=r"^model\.path=.* lm_head\.weight ") if is_other else nullcontext():
                load(tmp_path, lora=lora)


def test_a_student_is_written_where_a_link_leads(tmp_path: Path) -> None:
    source, place, link = save_model(tmp_path / "source"), tmp_path / "large" / "student", tmp_path / "model"
    (place / "old").mkdir(parents=True)
    link.symlink_to(place)
    write_pretrained(load(source), str(source), Lora(), torch.float32, link, writes=True)
    assert link.is_symlink() and (place / "model.safetensors").exists() and not (place / "old").exists()
    assert [path.name for path in place.parent.iterdir()] == ["student"]
    place.rename(place.with_name("aside"))
    place.symlink_to(link)  # so that both lead nowhere
    with pytest.raises(StudentNotWritten, match=f"{tmp_path}/.*model"):
        write_pretrained(load(source), str(source), Lora(), torch.float32, link, writes=True)


@pytest.mark.parametrize("settings", [{"temperature": 0.6}, {"eos_token_id": [1, 2]}, None])
def test_what_is_written_stops_where_the_chat_template_ends_a_turn(
    settings: dict[str, object] | None, tmp_path: Path
) -> None:
    """A base model's own settings need not name that token; samples of a run end there all the same."""
    tokenizer = chat_tokenizer()
    source, target = save_model(tmp_path / "source", len(tokenizer), tokenizer), tmp_path / "target"
    end = template_end(tokenizer)
    assert end is not None and end not in ModelInfo.read(str(source), "model.path", tokenizer).eos_ids
    file = source / "generation_config.json"
    file.unlink() if settings is None else file.write_text(json.dumps(settings))
    write_pretrained(load(source), str(source), Lora(), torch.float32, target, writes=True)
    written = json.loads((target / file.name).read_text())
    assert end in written["eos_token_id"]
    assert {key: written[key] for key in settings or {} if key != "eos_token_id"} == {
        key: value for key, value in (settings or {}).items() if key != "eos_token_id"
    }
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()  # every token as likely as the others
    torch.manual_seed(0)
    sampled = model.generate(torch.zeros((16, 1), dtype=torch.long), do_sample=True, max_new_tokens=40)
    rows = [row[1:].tolist() for row in sampled]
    assert any(end in row for row in rows)
    for row in rows:
        first = next((place for place, token in enumerate(row) if token in written["eos_token_id"]), len(row))
        assert len(set(row[first + 1 :])) <= 1  # padding


@pytest.mark.parametrize("family", ["qwen3_5", "gpt_oss"])
def test_a_student_without_weights_gives_rows_to_the_layers_that_the_whole_one_does(
    family: str, tmp_path: Path
) -> None:
    """As ranks have it that are not the first."""
    models.make(family).save_pretrained(tmp_path)
    whole = load(tmp_path)
    empty = load(tmp_path, attention=whole.lm.config._attn_implementation)
    assert {value.device.type for value in empty.parameters()} == {"meta"}
    empty.to_empty(device=torch.device("cpu"))
    with torch.no_grad():
        for own, its in ((empty.lm.parameters(), whole.lm.parameters()), (empty.lm.buffers(), whole.lm.buffers())):
            for empty_value, value in zip(own, its, strict=True):
                empty_value.copy_(value)
        micro = collate(models.group(3, n_prompt=6), None, [1.0] * 3, [0.0] * 3, shared=True)
        assert torch.equal(empty.compute_hidden(micro), whole.compute_hidden(micro))
