"""The recipe's script that makes two models of a user's own questions and answers."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from gkd.config import Data
from gkd.data.prompts import load_prompts
from gkd.data.tokenizer import check_causal_lm, check_same_tokenizer, load_tokenizer

SCRIPT = Path(__file__).parents[2] / "recipes" / "on_policy_distill" / "prepare.py"
SMALL = "--vocab-size 300 --batch-size 4 --teacher-width 64 --student-width 32 --teacher-steps 2 --student-steps 1"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments, *SMALL.split()])
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    rows = [{"question": f"What is {i} + 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_makes_two_models_that_a_run_can_use(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, str(questions), "--out", str(tmp_path))
    printed = capsys.readouterr().out
    assert "teacher: step 2 of 2, loss " in printed
    assert len(re.findall(r"\d\.\d+ nats\b", printed)) == 2
    for name in ("teacher", "student"):
        check_causal_lm(str(tmp_path / name), "model.path")
        config = AutoModelForCausalLM.from_pretrained(tmp_path / name).generation_config
        assert config.eos_token_id == load_tokenizer(str(tmp_path / name)).eos_token_id
    check_same_tokenizer(str(tmp_path / "student"), str(tmp_path / "teacher"))


def test_a_runs_prompts_are_what_the_models_were_trained_on(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, str(questions), "--out", str(tmp_path))
    tokenizer = load_tokenizer(str(tmp_path / "student"))
    (prompt, *_) = load_prompts([str(questions)], Data(prompt_key="question"), tokenizer).prompts
    encode = runpy.run_path(str(SCRIPT))["encode"]
    (text,) = encode([(prompt.text, "It is 1.")], tokenizer)
    assert text[: len(prompt.token_ids)].tolist() == prompt.token_ids.tolist()
    assert (prompt.token_ids[-1], text[-1]) == (tokenizer.sep_token_id, tokenizer.eos_token_id)
    assert tokenizer.decode(text[len(prompt.token_ids) :], skip_special_tokens=True) == "It is 1."


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--question-key", "q"], "'q' (--question-key)"),
        (["--out", "."], "--out=.: already holds teacher/"),
    ],
)
def test_mistakes_end_in_one_line(
    questions: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    extra: list[str],
    message: str,
) -> None:
    (tmp_path / "teacher").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, str(questions), "--out", str(tmp_path / "new"), *extra)
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert message in error
    assert error.count("\n") == 1
