"""What a row asks: prompt templates, system prompts, chats."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from gkd.config import Data
from gkd.data.prompts import load_prompts
from gkd.data.rendering import Renderer, Rendering
from gkd.data.row import Row
from gkd.data.templates import question_of
from gkd.errors import ConfigError
from gkd.evaluation.engines import make_prompt
from gkd.evaluation.questions import Question
from tests.data.models import TEMPLATE, WORDS, word_tokenizer

ROW = Row(
    {"question": "1 + 1?", "choices": ["1", "2"], "meta": {"level": 3}, "answer": "2", "hint": float("nan")}, "x line 1"
)
USER = {"role": "user", "content": "1 + 1?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def question(row: Row = ROW, **data: Any) -> Any:
    return question_of(row, data.get("prompt_key", "question"), Data(**data))


def test_text_stays_text_or_becomes_a_users_message() -> None:
    assert question() == "1 + 1?"
    assert question(apply_chat_template=True) == [USER]
    assert question(system_prompt="Be brief.") == [SYSTEM, USER]


def test_a_system_prompt_is_for_messages_without_one() -> None:
    own = {"role": "system", "content": "Be long."}
    for messages, expected in (([USER], [SYSTEM, USER]), ([own, USER], [own, USER])):
        assert question(Row({"question": messages}, "x"), system_prompt="Be brief.") == expected


def test_a_system_prompt_leaves_a_list_that_holds_no_messages_to_its_refusal() -> None:
    for value in (["1 + 1?"], [{"content": "1 + 1?"}], [["a"]]):
        assert question(Row({"question": value}, "x line 1"), system_prompt="Be brief.") == value


def test_a_prompt_template_takes_columns_and_leaves_other_braces() -> None:
    template = "{question} {choices.1} {meta.level} \\boxed{} {{answer}} {1}"
    assert question(prompt_template=template, answer_key="answer") == "1 + 1? 2 3 \\boxed{} {answer} {1}"
    assert question(prompt_template="Q: {question}", system_prompt="Be brief.")[1]["content"] == "Q: 1 + 1?"
    spaced = Row({"Question Text": "1 + 1?"}, "x line 1")
    template = "{Question Text} \\boxed{your answer}"
    assert question(spaced, prompt_template=template) == "1 + 1? \\boxed{your answer}"
    with pytest.raises(ConfigError, match=r"^x line 1 .*data\.prompt_template.*\{A B\}"):
        question(spaced, prompt_template="{A B}")
    assert question(Row({"question": "{answer}", "answer": "2"}, "x"), prompt_template="{question}") == "{answer}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{questoin}", r"^x line 1 .*'questoin' \(data\.prompt_template\)"),
        ("{choices}", r"^x line 1: 'choices' .*\blist\b.*data\.prompt_template"),
        ("{hint}", r"^x line 1: 'hint' .*\bnan\b.*data\.prompt_template"),
    ],
)
def test_a_template_that_does_not_fit_the_row(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        question(prompt_template=template)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"prompt_template": "no place {} {{question}}"}, "prompt_template"),
        ({"prompt_template": "{q} {a}", "answer_key": "a"}, "{{a}}"),
        ({"prompt_template": "{q} {a b}", "answer_key": "a b"}, "{{a b}}"),
        ({"system_prompt": "x", "apply_chat_template": False}, "apply_chat_template=false excludes it"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"train_weights": [1.0], "train_files": ["a", "b"]}, "train_weights=[1.0]: "),
    ],
)
def test_settings_that_do_not_go_together(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Data(**data)
    assert message in str(caught.value)


def test_the_chat_template_is_given_further_variables(tmp_path: Any) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\n')
    thinking = word_tokenizer(
        template=TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}b{% endif %}"
    )

    def tokens(tokenizer: Any, **data: Any) -> list[str]:
        (prompt,) = load_prompts([str(tmp_path / "x.jsonl")], Data(**data), tokenizer).prompts
        return [WORDS[i] for i in prompt.token_ids]

    assert tokens(thinking, apply_chat_template=True) == ["<user>", "a", "<assistant>"]
    off: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    assert tokens(thinking, apply_chat_template=True, **off) == ["<user>", "a", "<assistant>", "b"]
    with pytest.raises(ConfigError, match=r"data\.chat_template_kwargs\.enable_thinking: "):
        tokens(word_tokenizer(template=TEMPLATE), apply_chat_template=True, **off)
    with pytest.raises(ConfigError, match=r"data\.system_prompt: .*chat template"):
        tokens(word_tokenizer(), system_prompt="b")


TOOLS = "{% for tool in tools or [] %}{{ tool['function']['name'] }} {{ tool['function'] | length }} {% endfor %}"


@pytest.mark.parametrize(
    ("tools", "shown"),
    [
        ([{"type": "function", "function": {"name": "b"}}, {"function": {"name": "c", "strict": None}}], ["b", "c"]),
        ('[{"type": "function", "function": {"name": "b"}}]', ["b"]),
        (None, []),
        ("", []),
        ([], []),
        ("[]", []),
    ],
)
@pytest.mark.parametrize("by_name", [False, True])
def test_the_chat_template_is_given_a_rows_tools(tools: Any, shown: list[str], by_name: bool, tmp_path: Any) -> None:
    """Also a teacher's, and that of what a strategy asks; null fields are Parquet's. Some have one for tools alone."""
    template: Any = {"default": TEMPLATE, "tool_use": TOOLS + TEMPLATE} if by_name else TOOLS + TEMPLATE
    tokenizer = word_tokenizer((*WORDS, "1"), template=template)
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": [USER | {"content": "a"}], "tools": tools}) + "\n")
    (prompt,) = load_prompts([str(tmp_path / "x.jsonl")], Data(), tokenizer).prompts
    text = " ".join([*(f"{name} 1" for name in shown), "<user> a <assistant>"])
    assert tokenizer.decode(prompt.token_ids) == text
    teacher = Renderer("teacher", tokenizer, Rendering.from_tokenizer(tokenizer))
    assert np.array_equal(teacher.token_ids([prompt])[0], prompt.token_ids)
    own = make_prompt(Question("", prompt, {}), "d", tokenizer)
    assert tokenizer.decode(own.token_ids) == text.replace(" a ", " d ")


def test_tools_that_are_none(tmp_path: Any) -> None:
    """A question that no template sees may have a column of that name."""
    tokenizer = word_tokenizer(template=TEMPLATE)
    for tools in ("a hammer", ["a hammer"], {"name": "b"}, '{"name": "b"}', 3):
        (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": "a", "tools": tools}) + "\n")
        assert load_prompts([str(tmp_path / "x.jsonl")], Data(), tokenizer).prompts[0].text == "a"
        with pytest.raises(ConfigError, match=r"x\.jsonl line 1: 'tools'"):
            load_prompts([str(tmp_path / "x.jsonl")], Data(apply_chat_template=True), tokenizer)
