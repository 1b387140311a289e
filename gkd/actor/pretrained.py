"""The student as a Hugging Face model directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer

from gkd.actor.model import Student, write_model
from gkd.config import Lora
from gkd.data.answers import template_end
from gkd.data.model_info import ModelInfo
from gkd.durable import reason, replace_directory
from gkd.errors import RunFailed


def write_pretrained(
    student: Student, model_path: str, lora: Lora, dtype: torch.dtype, directory: Path, writes: bool
) -> None:
    """Write weights, configurations and tokenizer, whole or not at all; what was in ``directory`` is replaced.

    ``model_path`` is the model that the student was made from, ``dtype`` what it computes in. An adapter is merged into
    the weights, and written by itself as well, in peft's format, to ``adapter``. A collective: one rank ``writes``.
    Raises RunFailed when the files cannot be written.
    """
    source = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    new = directory.with_name(f".{directory.name}.incomplete")
    state = {name: t.cpu() for name, t in student.full_tensors(source) if writes}
    adapter = {name: t.cpu() for name, t in student.adapter_tensors() if writes} if student.has_adapter else {}
    if not writes:
        return
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir(parents=True)
        write_model(student.lm, model_path, state, source, str(new))
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        tokenizer.save_pretrained(new)
        _stop_at(template_end(tokenizer), new)
        if student.has_adapter:
            from gkd.actor.lora import save_adapter

            save_adapter(adapter, lora, model_path, new / "adapter")
        replace_directory(new, directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        raise RunFailed(f"the student could not be written: {reason(error, new)}") from None


def _stop_at(end: int | None, directory: Path) -> None:
    """Have generation_config.json name the token that ends a turn, as samples end there: a base model's need not."""
    if end is None:
        return
    known = ModelInfo.read(str(directory), "model").eos_ids
    file = directory / "generation_config.json"
    settings: dict[str, object] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    named = settings.get("eos_token_id")
    if end not in (named if isinstance(named, list) else [named]):
        settings["eos_token_id"] = sorted({*known, end})
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
