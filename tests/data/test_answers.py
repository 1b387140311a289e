"""The data's own answers: their end token, and where they have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from gkd.config import load
from gkd.data.answers import turn_end, with_answers, with_turn_end
from gkd.data.model_info import ModelInfo
from gkd.driver.inputs.find import find_inputs
from gkd.errors import ConfigError
from gkd.types import Prompt
from tests.data.models import TEMPLATE, WORDS, save_model, word_tokenizer

MODEL = ModelInfo(vocabulary=len(WORDS) + 1, positions=None, eos_ids=[1], n_tokens=len(WORDS) + 1)
A, B, C = (WORDS.index(letter) for letter in "abc")
EOS, IM_END = 1, len(WORDS)
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] | trim }} <|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def chat_tokenizer(template: str = CHAT) -> Any:
    tokenizer = word_tokenizer(template=template)
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=True)])
    return tokenizer


def prompt(answer: str, chat: bool) -> Prompt:
    messages = ({"role": "user", "content": "a"},) if chat else None
    return Prompt(0, np.array([A], np.int32), "a", answer=answer, messages=messages)


def ids(prompts: list[Prompt], tokenizer: Any, max_tokens: int = 8) -> list[list[int]]:
    answered = with_answers(prompts, tokenizer, MODEL, turn_end(prompts, tokenizer), max_tokens)
    return [p.answer_ids.tolist() for p in answered if p.answer_ids is not None]


def test_an_answer_ends_as_the_chat_template_ends_a_turn() -> None:
    """And a prompt that is plain text, beside it, with the tokenizer's end token."""
    assert ids([prompt("a b", True), prompt("c", False)], chat_tokenizer()) == [[A, B, IM_END], [C, EOS]]
    assert ids([prompt("a b", False)], chat_tokenizer()) == [[A, B, EOS]]


@pytest.mark.parametrize("template", [TEMPLATE, "{% for m in messages %}{{ 1 / (m['role'] == 'user') }}{% endfor %}"])
def test_a_template_that_ends_no_turn_with_a_token_of_its_own(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    assert turn_end([prompt("a", True)], tokenizer) is None
    assert ids([prompt("a", True)], tokenizer) == [[A, EOS]]


def test_an_answer_that_is_cut_has_no_end() -> None:
    assert ids([prompt("a b c", True)], chat_tokenizer(), 2) == [[A, B]]
    assert ids([prompt("a b c", True)], chat_tokenizer(), 3) == [[A, B, C]]
    assert ids([prompt("a b c", True)], chat_tokenizer(), 4) == [[A, B, C, IM_END]]


def test_answers_are_tokenised_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, a million take minutes on a machine with many cores, of which one works."""
    tokenizer, sizes = chat_tokenizer(), []
    own = type(tokenizer).__call__

    def count(self: Any, texts: list[str], **settings: Any) -> Any:
        sizes.append(len(texts))
        return own(self, texts, **settings)

    end, mixed = turn_end([prompt("a", True)], tokenizer), [prompt("a b", True), prompt("c", False)] * 1_200
    monkeypatch.setattr(type(tokenizer), "__call__", count)
    answered = with_answers(mixed, tokenizer, MODEL, end, 8)
    assert [p.answer_ids.tolist() for p in answered[-2:] if p.answer_ids is not None] == [[A, B, IM_END], [C, EOS]]
    assert sizes == [1_000, 1_000, 400] and len(answered) == 2_400


def test_engines_stop_where_a_turn_ends() -> None:
    end = turn_end([prompt("a", True)], chat_tokenizer())
    assert with_turn_end(MODEL, end).eos_ids == [EOS, IM_END]
    assert with_turn_end(MODEL, None) == MODEL


def test_no_end_token_at_all() -> None:
    with pytest.raises(ConfigError, match="end token"):
        with_answers([prompt("a", False)], word_tokenizer(), ModelInfo(9, None, [], 9), None, 8)


def test_a_runs_inputs_have_both(tmp_path: Path) -> None:
    """What engines stop at, and what the data's answers end with, from the model's directory and the files alone."""
    model = save_model(tmp_path / "model", len(WORDS) + 1, chat_tokenizer())
    rows = [{"messages": [{"role": "user", "content": "a"}], "answer": "a b"}] * 2
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [str(tmp_path / "data.jsonl")]
    inputs = find_inputs(
        load(
            {
                "model": {"path": str(model)},
                "teacher": {"model": {"path": str(model)}},
                "data": {"train_files": files, "val_files": files, "answer_key": "answer"},
                "algorithm": {"on_policy_share": 0.5},
            }
        ),
        print,
    )
    assert {EOS, IM_END} <= set(inputs.model.eos_ids)
    assert [prompt.answer_ids.tolist() for prompt in inputs.train.prompts] == [[A, B, IM_END]] * 2


def test_a_token_without_a_row_of_logits_ends_nothing(tmp_path: Path) -> None:
    """Else engines would pad with it."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 8, "eos_token_id": [7, 8]}))
    assert ModelInfo.read(str(tmp_path), "model.path").eos_ids == [7]
