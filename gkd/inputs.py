"""Models and data of a run, found and checked before Ray starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gkd.algorithms.top_k import top_k_wanted
from gkd.config import Config
from gkd.data.builtin import prepare_builtin
from gkd.data.prompts import PromptSet, load_prompts
from gkd.data.tokenizer import check_causal_lm, check_same_tokenizer, load_tokenizer, tokenizer_hash
from gkd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Inputs:
    """Directories of student and teacher (None for an external teacher), tokenized prompts, and what they share.

    ``vocab_size`` is the number of the student's logits, ``eos_ids`` the tokens that end a response,
    ``max_length`` the tokens that a prompt and its response may have together.
    """

    student: str
    teacher: str | None
    tokenizer: Any
    tokenizer_hash: str
    train: PromptSet
    val: PromptSet
    vocab_size: int
    eos_ids: list[int]
    max_length: int


def find_inputs(config: Config, say: Callable[[str], None]) -> Inputs:
    """Make the built-in task's models and data, or check the user's own. Raises ConfigError for what cannot be used."""
    teacher: str | None
    if config.uses_builtin_task:
        made = prepare_builtin(config, say)
        student, teacher, train, val = made.student, made.teacher, made.train_files, made.val_files
    else:
        assert config.model.path is not None
        student = check_causal_lm(config.model.path, "model.path")
        served = config.teacher.model.path
        teacher = None if served is None else check_causal_lm(served, "teacher.model.path")
        train, val = config.data.train_files, config.data.val_files
    if teacher:
        check_same_tokenizer(student, teacher)
    tokenizer = load_tokenizer(student)
    described = _read_json(Path(student, "config.json"))
    max_length = _max_length(config, described)
    data = config.data.model_copy(update={"max_prompt_length": max_length - config.rollout.max_response_length})
    train_prompts = load_prompts(train, data, tokenizer)
    val_prompts = load_prompts(val, data, tokenizer, limit=config.data.val_limit)
    for name, found in (("train", train_prompts), ("val", val_prompts)):
        if found.n_too_long:
            left_out = f"{found.n_too_long} prompts longer than {data.max_prompt_length} tokens are left out"
            say(f"data.{name}_files: {left_out}, {len(found.prompts)} are used")
    vocab_size = int(_text(described)["vocab_size"])
    top_k_wanted(config, vocab_size)  # says now what could not be asked of the teacher
    return Inputs(
        student,
        teacher,
        tokenizer,
        tokenizer_hash(tokenizer),
        train_prompts,
        val_prompts,
        vocab_size,
        eos_ids(Path(student), tokenizer),
        max_length,
    )


def eos_ids(model: Path, tokenizer: Any) -> list[int]:
    """Tokens that end a response: those of generation_config.json, config.json and the tokenizer together."""
    found: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        if (model / file).is_file():
            value = _read_json(model / file).get("eos_token_id")
            found |= {int(v) for v in (value if isinstance(value, list) else [value]) if v is not None}
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return sorted(found)


def _max_length(config: Config, described: dict[str, Any]) -> int:
    """max_prompt_length + max_response_length, or as many positions as the student has."""
    wanted = config.data.max_prompt_length + config.rollout.max_response_length
    positions = _text(described).get("max_position_embeddings")
    length = wanted if positions is None else min(wanted, int(positions))
    if length <= config.rollout.max_response_length:
        raise ConfigError(
            f"rollout.max_response_length={config.rollout.max_response_length} leaves no room for a prompt: "
            f"the student has {positions} positions"
        )
    return length


def _text(described: dict[str, Any]) -> dict[str, Any]:
    """The part of a model's config.json that describes its language model."""
    return described.get("text_config") or described


def _read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
