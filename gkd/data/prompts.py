"""Prompts of a run: from rows to tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from gkd.config import Data
from gkd.data.layouts import (
    VERL_ANSWER,
    answers_of,
    is_messages,
    messages_to_answer,
    prompt_key,
    prompt_of,
    require_text_alone,
    tools_of,
)
from gkd.data.reader import read_rows
from gkd.data.row import Row
from gkd.data.templates import begins_itself, columns_of, question_of, render, require_template, special_ids_around
from gkd.errors import ConfigError
from gkd.types import Prompt

TOKENISED_AT_ONCE = 1000  # what a tokenizer makes of a text is thirty times as large as its tokens
LENGTHS_COUNTED = 2  # a prompt of more tokens than so many times the limit is counted no further
CHARACTERS_A_TOKEN = 8  # of a usual text there are about 4


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts that fit, and how many were left out because they were too long."""

    prompts: list[Prompt]
    n_too_long: int


def load_prompts(
    files: Sequence[str], data: Data, tokenizer: Any, limit: int | None = None, columns: bool = False
) -> PromptSet:
    """Return prompts of ``files`` in their order, at most ``limit`` of them; as :func:`read_prompts`.

    Raises ConfigError also when no prompt fits into ``data.max_prompt_length``.
    """
    fitting: list[Prompt] = []
    n_too_long, shortest = 0, 0
    longest = data.max_prompt_length
    for prompts in read_prompts(files, data, tokenizer, columns):
        for prompt in prompts:
            length = len(prompt.token_ids)
            if length <= longest:
                fitting.append(prompt)
            else:
                n_too_long += 1
                shortest = min(shortest, length) if shortest else length
        if limit is not None and len(fitting) >= limit:
            return PromptSet(fitting[:limit], n_too_long)
    if not fitting:
        raise make_too_long_error(files, longest, shortest)
    return PromptSet(fitting, n_too_long)


def read_prompts(files: Sequence[str], data: Data, tokenizer: Any, columns: bool = False) -> Iterator[Sequence[Prompt]]:
    """Yield prompts of ``files`` in their order, of any length, some at a time; ids count rows over all files from 0.

    ``columns``: whether prompts keep all of their rows. Of a prompt that has more than :data:`LENGTHS_COUNTED` times
    ``data.max_prompt_length`` tokens, only so many are there that this is certain.

    A string is tokenised with the tokenizer's own special tokens, but an end token, unless it begins with the first of
    them; a list of messages goes through its chat template, without the assistant's turns at its end;
    :func:`gkd.data.templates.question_of` states which of them is asked.
    Raises ConfigError for whatever is wrong with a file, a row or a template.
    """
    first_id = 0
    require_template(tokenizer, data)
    for number, file in enumerate(files):
        rows = read_rows(file)
        while chunk := list(islice(rows, TOKENISED_AT_ONCE)):
            yield list(_prompts(chunk, data, tokenizer, first_id, number, columns))
            first_id += len(chunk)


def make_too_long_error(files: Sequence[str], longest: int, shortest: int) -> ConfigError:
    """Return the error of ``files`` without a prompt of at most ``longest`` tokens; the ``shortest`` has so many."""
    bound = LENGTHS_COUNTED * longest
    has = f"{shortest}" if shortest <= bound else f"more than {bound}"
    return ConfigError(
        f"every prompt in {', '.join(files)} is longer than {longest} tokens (data.max_prompt_length, within the "
        f"models' positions), the shortest has {has} tokens"
    )


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return SHA-256 (hex) of prompts as they are used: tokens, also the teacher's, answers, teachers and order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        parts = (prompt.token_ids, prompt.answer_ids, prompt.teacher_ids)
        lengths = [None if part is None else len(part) for part in parts]
        digest.update(json.dumps([prompt.id, prompt.answer, prompt.teacher, *lengths, *prompt.other_answers]).encode())
        for part in parts:
            if part is not None:
                digest.update(part.astype(np.int32).tobytes())
    return digest.hexdigest()


def _prompts(rows: list[Row], data: Data, tokenizer: Any, first_id: int, file: int, columns: bool) -> Iterator[Prompt]:
    for row in rows:
        require_text_alone(row)
    values = [question_of(row, prompt_key(row, data), data) for row in rows]
    answers = [answers_of(row, data) for row in rows]
    texts, ids = _tokenise(rows, values, tokenizer, data)
    for offset, (text, token_ids, value, right) in enumerate(zip(texts, ids, values, answers, strict=True)):
        row = rows[offset]
        if not token_ids:
            raise ConfigError(f"{row.place}: the prompt in {_source(row, data)!r} has no tokens")
        prompt = Prompt(
            id=first_id + offset,
            token_ids=np.asarray(token_ids, dtype=np.int32),
            text=text,
            answer=right[0] if right else None,
            other_answers=right[1:],
            file=file,
            columns=row.values if columns else {},
            messages=None if isinstance(value, str) else tuple(messages_to_answer(value)),
            tools=() if isinstance(value, str) else tools_of(row),
            teacher=None if data.teacher_key is None else str(row.get(data.teacher_key, "data.teacher_key")),
            question=_digest_question(row, data, right),
        )
        for read in prompt.answers:
            _require_text(row, data.answer_key or VERL_ANSWER, read)
        _require_text(row, data.teacher_key, prompt.teacher or "")
        yield prompt


def _digest_question(row: Row, data: Data, answers: tuple[str, ...]) -> str:
    """Return :attr:`gkd.types.Prompt.question`; with ``data.prompt_template`` of the columns that it takes."""
    if data.prompt_template is None:
        question = prompt_of(row, prompt_key(row, data))
    else:
        columns = {name: row.find(name) for name in columns_of(row, data.prompt_template)}
        question = columns if len(columns) > 1 else next(iter(columns.values()))
    if isinstance(question, list):
        messages = messages_to_answer(question)
        question = [message for message in messages if message["role"] != "system"] or messages
    text = json.dumps([question, *answers], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _source(row: Row, data: Data) -> str:
    """Return what a row's prompt is from, as an error names it: the template, or a column."""
    return prompt_key(row, data) if data.prompt_template is None else "data.prompt_template"


def _require_text(row: Row, key: str | None, text: str) -> None:
    """Raise ConfigError for what JSON can hold and UTF-8 cannot: nothing could write it down, or send it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{row.place}: {key!r} holds half of a surrogate pair, which is no text") from None


def _tokenise(rows: list[Row], values: list[Any], tokenizer: Any, data: Data) -> tuple[list[str], list[list[int]]]:
    """Return text and token ids of each row's prompt; strings and messages may be mixed.

    Of a prompt that has more than :data:`LENGTHS_COUNTED` times ``data.max_prompt_length`` tokens, only so many that
    this is certain.
    """
    longest, texts, complete = data.max_prompt_length, [], []
    for row, value in zip(rows, values, strict=True):
        key = _source(row, data)
        if not isinstance(value, str) and not is_messages(value):
            raise ConfigError(f"{row.place}: {key!r} is neither a string nor a list of messages with role and content")
        texts.append(value if isinstance(value, str) else render(row, key, value, tokenizer, data))
        complete.append(not isinstance(value, str) or begins_itself(value, getattr(tokenizer, "bos_token", None)))
        _require_text(row, key, texts[-1])
    (before, after), ids = special_ids_around(tokenizer), [list[int]()] * len(texts)
    unfinished, n_characters = list(range(len(texts))), max(1000, 2 * LENGTHS_COUNTED * CHARACTERS_A_TOKEN * longest)
    while unfinished:  # by beginnings: ten million tokens would take a minute
        beginnings = [texts[i][:n_characters] for i in unfinished]
        encoded = tokenizer(beginnings, add_special_tokens=False, verbose=False)["input_ids"]
        for i, token_ids in zip(unfinished, encoded, strict=True):
            ids[i] = token_ids if complete[i] else [*before, *token_ids, *after]
        unfinished = [
            i for i in unfinished if len(texts[i]) > n_characters and len(ids[i]) <= LENGTHS_COUNTED * longest
        ]
        n_characters *= 4
    return texts, ids
