"""Prompts of the task: sort digits. ``3 1 4 1 5 9 2 6 =`` is answered by ``1 1 2 3 4 5 6 9`` and the end token.

Small enough to be learnt on a CPU while one waits, and every answer can be checked. Which prompts are held out is a
property of the prompt itself, so that no model or data file, whatever its seed, ever trains on one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "val"]
Int64 = NDArray[np.int64]

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
EQUALS_ID = 4
FIRST_DIGIT_ID = 5
VOCABULARY = (*SPECIAL_TOKENS, "=", *"0123456789")

HELD_OUT_ONE_IN = 8
N_TRAIN, N_VAL = 20_000, 512


@dataclass(frozen=True, slots=True)
class Example:
    """One line of a data file."""

    prompt: str
    answer: str


def make_tokenizer() -> Any:
    """Return a tokenizer with a token for every digit, ``=``, and the special ones; it prepends ``<bos>``."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS_ID)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def example(digits: Int64) -> Example:
    """Return prompt and answer of one row of digits."""
    return Example(prompt=_join_digits(digits) + " =", answer=_join_digits(np.sort(digits)))


def _join_digits(digits: Int64) -> str:
    return " ".join(map(str, digits.tolist()))


def split_of(digits: Int64) -> Split:
    """Return whether a row of digits may be trained on; the same for every seed."""
    return "val" if zlib.crc32(bytes(digits.astype(np.uint8))) % HELD_OUT_ONE_IN == 0 else "train"


def draw(rng: np.random.Generator, n: int, digits: int, split: Split) -> Int64:
    """Return ``n`` random rows of digits [n, digits] of one split, with repetition."""
    drawn: list[Int64] = []
    while len(drawn) < n:
        drawn += [row for row in rng.integers(0, 10, (n, digits)) if split_of(row) == split]
    return np.stack(drawn[:n])


def token_rows(rows: Int64) -> Int64:
    """Return token ids [n, 2 * digits + 3] for rows [n, digits]: <bos>, digits, =, sorted digits, <eos>."""

    def column(token: int) -> Int64:
        return np.full((len(rows), 1), token, dtype=np.int64)

    question, answer = rows + FIRST_DIGIT_ID, np.sort(rows, axis=1) + FIRST_DIGIT_ID
    return np.concatenate([column(BOS_ID), question, column(EQUALS_ID), answer, column(EOS_ID)], axis=1)


def n_prompt_tokens(digits: int) -> int:
    """Return tokens before the response: <bos>, the digits, and =."""
    return digits + 2


def examples(seed: int, digits: int, split: Split) -> list[Example]:
    """Return different examples of one split, equal for equal seeds; all there are where these are few."""
    n_examples = N_TRAIN if split == "train" else N_VAL
    rng = np.random.default_rng((seed, digits))
    return [example(row) for row in islice(_draw_distinct(rng, digits, split, n_examples), n_examples)]


def _draw_distinct(rng: np.random.Generator, digits: int, split: Split, n_examples: int) -> Iterator[Int64]:
    if 10**digits <= 10 * HELD_OUT_ONE_IN * n_examples:
        # Few enough to list: drawing until the last one comes would take for ever.
        for number in rng.permutation(10**digits):
            row = np.array([int(digit) for digit in f"{number:0{digits}d}"], dtype=np.int64)
            if split_of(row) == split:
                yield row
        return
    previous_rows: set[bytes] = set()
    while True:
        for row in draw(rng, 1000, digits, split):
            if row.tobytes() not in previous_rows:
                previous_rows.add(row.tobytes())
                yield row


def write_examples(file: Path, rows: list[Example]) -> None:
    """Write a JSONL file with the columns ``prompt`` and ``answer``."""
    lines = (json.dumps({"prompt": row.prompt, "answer": row.answer}) + "\n" for row in rows)
    file.write_text("".join(lines), encoding="utf-8")
