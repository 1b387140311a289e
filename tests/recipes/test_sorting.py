"""The built-in task: right answers, held-out prompts, and its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from gkd.recipes.sort_digits import sorting
from gkd.rewards.accuracy import agreement


def test_the_example_of_the_module() -> None:
    example = sorting.example(np.array([3, 1, 4, 1, 5, 9, 2, 6]))
    assert (example.prompt, example.answer) == ("3 1 4 1 5 9 2 6 =", "1 1 2 3 4 5 6 9")


@pytest.mark.parametrize("digits", [2, 3, 4, 8, 32])
def test_splits_are_disjoint_different_and_right(digits: int) -> None:
    train, val = (sorting.examples(7, digits, split) for split in ("train", "val"))
    train_prompts, val_prompts = {row.prompt for row in train}, {row.prompt for row in val}
    assert train and val
    assert not train_prompts & val_prompts
    assert (len(train_prompts), len(val_prompts)) == (len(train), len(val))
    for row in train + val:
        numbers = row.prompt.removesuffix(" =").split()
        assert len(numbers) == digits
        assert row.answer.split() == sorted(numbers)


def test_small_tasks_are_used_up() -> None:
    assert sum(len(sorting.examples(0, 2, split)) for split in ("train", "val")) == 100


def test_usual_tasks_have_as_many_as_wanted() -> None:
    assert len(sorting.examples(0, 8, "train")) == sorting.N_TRAIN
    assert len(sorting.examples(0, 8, "val")) == sorting.N_VAL


def test_examples_depend_on_the_seed_alone() -> None:
    assert sorting.examples(1, 8, "val") == sorting.examples(1, 8, "val")
    assert sorting.examples(1, 8, "val") != sorting.examples(2, 8, "val")


def test_what_is_drawn_for_training_is_never_held_out() -> None:
    rows = sorting.draw(np.random.default_rng(0), 500, 3, "train")
    held_out = {row.prompt for row in sorting.examples(0, 3, "val")}
    assert rows.shape == (500, 3)
    assert not {sorting.example(row).prompt for row in rows} & held_out


def test_the_saved_tokenizer_reads_prompts_and_writes_answers(tmp_path: Path) -> None:
    sorting.make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    (ids,) = sorting.token_rows(np.array([[3, 1, 4, 1]]))
    split = sorting.n_prompt_tokens(4)
    assert tokenizer("3 1 4 1 =")["input_ids"] == ids[:split].tolist()
    assert ids[-1] == tokenizer.eos_token_id
    response = tokenizer.decode(ids[split:].tolist(), skip_special_tokens=True)
    assert response == "1 1 3 4"
    assert agreement(response, sorting.example(np.array([3, 1, 4, 1])).answer) == 1.0
    assert len(tokenizer) == len(sorting.VOCABULARY)


def test_written_examples_are_read_back(tmp_path: Path) -> None:
    rows = sorting.examples(0, 3, "val")
    sorting.write_examples(tmp_path / "val.jsonl", rows)
    read = [json.loads(line) for line in (tmp_path / "val.jsonl").read_text().splitlines()]
    assert read == [{"prompt": row.prompt, "answer": row.answer} for row in rows]
