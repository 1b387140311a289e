"""The word problems of the recipe with three stages, and the models that it begins with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gkd.config import Data
from gkd.data.prompts import load_prompts
from gkd.data.tokenizer import check_same_tokenizer, load_tokenizer
from gkd.errors import ConfigError
from gkd.recipes.from_sft_to_grpo import prepare as recipe


def test_every_step_of_every_answer_is_right_and_leads_to_the_last_line() -> None:
    problems = list(recipe.problems(300, seed=0))
    assert len({question for question, _ in problems}) == 300
    for question, answer in problems:
        *steps, last = answer.split("\n")
        results = []
        for step in steps:
            a, sign, b, result = re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+)", step).groups()  # type: ignore[union-attr]
            x, y = int(a), int(b)
            assert {"+": x + y, "-": x - y, "*": x * y, "/": x / y}[sign] == int(result)
            results.append(result)
        assert last == f"#### {results[-1]}" and int(results[-1]) >= 1
        assert not re.search(r"\{|\}", question)


def test_models_and_files_that_a_run_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "N_TRAIN", 64)
    monkeypatch.setattr(recipe, "N_TEST", 16)
    recipe.prepare(tmp_path, None, None, vocab_size=400, seed=0)
    check_same_tokenizer(str(tmp_path / "student"), str(tmp_path / "teacher"))
    tokenizer = load_tokenizer(str(tmp_path / "student"))
    settings = Data(prompt_key="question", answer_key="answer")
    learned, held_out = (
        load_prompts([str(tmp_path / f"{name}.jsonl")], settings, tokenizer).prompts for name in ("train", "test")
    )
    assert (len(learned), len(held_out)) == (64, 16)
    assert not {prompt.text for prompt in learned} & {prompt.text for prompt in held_out}
    with pytest.raises(ConfigError, match="already holds teacher/"):
        recipe.prepare(tmp_path, None, None, vocab_size=400, seed=0)


def test_files_of_gsm8k_take_the_place_of_problems_made_here(tmp_path: Path) -> None:
    rows = [{"question": f"What is {i} plus {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(20)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = str(tmp_path / "own.jsonl")
    recipe.prepare(tmp_path / "out", own, own, vocab_size=300, seed=0)
    assert [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()] == rows
    with pytest.raises(ConfigError, match="--train and --test go together"):
        recipe.prepare(tmp_path / "other", own, None, vocab_size=300, seed=0)
