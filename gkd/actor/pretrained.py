"""The student as a Hugging Face model directory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from gkd.actor.loading import build_empty
from gkd.actor.model import Student
from gkd.config import Lora
from gkd.data.answers import template_end
from gkd.data.model_info import ModelInfo
from gkd.data.tokenizer import read_tokenizer
from gkd.durable import reason, replace_directory
from gkd.errors import StudentNotWritten
from gkd.weights.packing import split_into_buckets

PROCESSOR_FILES = "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"
"""What a model that sees images as well is not read without, by vLLM."""
SHARD_BYTES = 4 << 30
"""Weights are written to files of about this size; what is written is held until a file is full."""


def write_pretrained(
    student: Student, model_path: str, lora: Lora, dtype: torch.dtype, directory: Path, writes: bool
) -> None:
    """Write weights, configurations and tokenizer, whole or not at all; what was in ``directory`` is replaced.

    ``model_path`` is the model that the student was made from, ``dtype`` what it computes in. An adapter is merged into
    the weights, and written by itself as well, in peft's format, to ``adapter``. A collective: one rank ``writes``, and
    holds one file's weights at a time. Raises StudentNotWritten when the files cannot be written.
    """
    stored = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    directory = Path(os.path.realpath(directory))  # what a link leads to, perhaps on another disk, is written there
    new = directory.with_name(f".{directory.name}.incomplete")
    adapter = {name: t.cpu() for name, t in student.adapter_tensors() if writes} if student.has_adapter else {}
    tensors = student.file_tensors(stored)
    try:
        if not writes:
            return
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        write_config(model_path, stored, new)
        tokenizer = read_tokenizer(model_path)
        tokenizer.save_pretrained(new)
        for file in PROCESSOR_FILES:
            if Path(model_path, file).exists():
                (new / file).write_bytes(Path(model_path, file).read_bytes())
        _stop_at(template_end(tokenizer), new)
        write_weights(tensors, new)
        if student.has_adapter:
            from gkd.actor.lora import save_adapter

            save_adapter(adapter, lora, model_path, new / "adapter")
        replace_directory(new, directory)
    except Exception as error:  # tokenizers have no class of their own for a full disk
        shutil.rmtree(new, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError) or "os error" in str(error):
            raise StudentNotWritten(f"the student could not be written: {reason(error, new)}") from None
        raise
    finally:
        for _ in tensors:  # gathering takes all ranks, also those that do not write and one that cannot go on
            pass


def write_weights(tensors: Iterator[tuple[str, Tensor]], directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write tensors, by the names that files have, to ``model.safetensors``, or to several files and their index.

    Raises OSError or SafetensorError.
    """
    shards: list[tuple[Path, list[str]]] = []
    total = 0
    on_host = ((name, tensor.cpu().contiguous()) for name, tensor in tensors)
    for bucket, _ in split_into_buckets(on_host, shard_bytes):
        file = directory / f"shard-{len(shards)}"
        save_file(bucket, file, {"format": "pt"})
        shards.append((file, list(bucket)))
        total += sum(tensor.nbytes for tensor in bucket.values())
        bucket.clear()  # before more is gathered
    if len(shards) == 1:
        shards[0][0].rename(directory / "model.safetensors")
        return
    owner: dict[str, str] = {}
    for number, (file, names) in enumerate(shards, start=1):
        final = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file.rename(directory / final)
        owner |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(owner.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_config(path: str, dtype: torch.dtype, directory: Path) -> None:
    """Write configuration and generation settings of a model of ``dtype`` of the kind that is in ``path``."""
    lm = build_empty(AutoConfig.from_pretrained(path, local_files_only=True), dtype)
    lm.config.dtype, lm.config.architectures = dtype, [type(lm).__name__]
    lm.config.save_pretrained(directory)
    settings_file = Path(path, "generation_config.json")
    if settings_file.exists():  # as it is: transformers refuses to write some that it reads
        Path(directory, settings_file.name).write_bytes(settings_file.read_bytes())
    else:
        lm.generation_config.save_pretrained(directory)


def _stop_at(end: int | None, directory: Path) -> None:
    """Have generation_config.json name the token that ends a turn, as samples end there: a base model's need not."""
    if end is None:
        return
    eos_ids = ModelInfo.read(str(directory), "model").eos_ids
    file = directory / "generation_config.json"
    settings: dict[str, object] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    named = settings.get("eos_token_id")
    if end not in (named if isinstance(named, list) else [named]):
        settings["eos_token_id"] = sorted({*eos_ids, end})
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
