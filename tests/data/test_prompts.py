"""From rows to prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from gkd.config import Data
from gkd.data.prompts import PromptSet, load_prompts
from gkd.data.templates import special_ids_around
from gkd.errors import ConfigError
from gkd.recipes.sort_digits.sorting import make_tokenizer
from tests.data.models import TEMPLATE, WORDS, word_tokenizer
from tests.error_text import contains_in_order

A, B, C = (WORDS.index(letter) for letter in "abc")
USER, SYSTEM, ASSISTANT = (WORDS.index(role) for role in ("<user>", "<system>", "<assistant>"))


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def load(
    tmp_path: Path, rows: list[dict[str, Any]], tokenizer: Any = None, limit: int | None = None, **data: Any
) -> PromptSet:
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_prompts([str(file)], Data(**data), tokenizer or word_tokenizer(template=TEMPLATE), limit)


def complaint(tmp_path: Path, rows: list[dict[str, Any]], **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, rows, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_strings_get_the_tokenizers_own_special_tokens(tmp_path: Path) -> None:
    (prompt,) = load(tmp_path, [{"prompt": "3 1 =", "answer": 13}], make_tokenizer(), answer_key="answer").prompts
    assert prompt.token_ids.dtype == np.int32
    assert prompt.token_ids.tolist() == [1, 8, 6, 4]
    assert (prompt.id, prompt.text, prompt.answer) == (0, "3 1 =", "13")


def test_text_that_a_template_made_before_is_begun_once(tmp_path: Path) -> None:
    """As others, which add no special tokens to a prompt, have it in their files."""
    prompts = load(tmp_path, [{"prompt": "<bos> 3 1 ="}, {"prompt": "3 1 ="}], make_tokenizer()).prompts
    assert [prompt.token_ids.tolist() for prompt in prompts] == [[1, 8, 6, 4]] * 2


def test_a_tokenizer_that_does_not_know_letters_begins_prompts_as_well() -> None:
    def tokenizer(text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        known = [ord(character) for character in text if character.isdigit()]
        return {"input_ids": [0, *known, 1] if add_special_tokens else known}

    tokenizer.bos_token_id, tokenizer.eos_token_id = 0, 1  # type: ignore[attr-defined]
    assert special_ids_around(tokenizer) == ([0], [])


def test_no_end_token_stands_between_a_prompt_and_its_response(tmp_path: Path) -> None:
    """Which some tokenizers put after every text."""
    tokenizer = make_tokenizer()
    ends = [("<bos>", 1), ("<eos>", tokenizer.eos_token_id)]
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=ends)
    assert tokenizer("3 1 =")["input_ids"] == [1, 8, 6, 4, tokenizer.eos_token_id]
    (prompt,) = load(tmp_path, [{"prompt": "3 1 ="}], tokenizer).prompts
    assert prompt.token_ids.tolist() == [1, 8, 6, 4]


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    messages = [message("system", "a"), message("user", "b")]
    (prompt,) = load(tmp_path, [{"messages": messages}]).prompts
    assert prompt.token_ids.tolist() == [SYSTEM, A, USER, B, ASSISTANT]
    assert prompt.answer is None


def test_messages_may_be_json_as_they_are_in_csv(tmp_path: Path) -> None:
    texts = [json.dumps([message("system", "a"), message("user", "b")]), "[ b", '["b"]']
    prompts = load(tmp_path, [{"prompt": text} for text in texts]).prompts
    assert prompts[0].token_ids.tolist() == [SYSTEM, A, USER, B, ASSISTANT]
    assert [prompt.messages is None for prompt in prompts] == [False, True, True]
    assert [prompt.text for prompt in prompts[1:]] == texts[1:]


def test_the_answer_is_in_such_messages_too(tmp_path: Path) -> None:
    turns = json.dumps([message("user", "b"), message("assistant", "c")])
    (prompt,) = load(tmp_path, [{"messages": turns}], answer_key="messages").prompts
    assert (prompt.token_ids.tolist(), prompt.answer) == ([USER, B, ASSISTANT], "c")


def test_text_of_many_brackets_is_text(tmp_path: Path) -> None:
    (prompt,) = load(tmp_path, [{"prompt": "[" * 200_000}]).prompts
    assert prompt.messages is None


def test_the_assistants_last_turns_are_not_part_of_the_prompt(tmp_path: Path) -> None:
    turns = [message("user", "a"), message("assistant", "b"), message("user", "c"), message("assistant", "d")]
    (prompt,) = load(tmp_path, [{"chat": turns}], prompt_key="chat").prompts
    assert prompt.token_ids.tolist() == [USER, A, ASSISTANT, B, USER, C, ASSISTANT]
    (again,) = load(tmp_path, [{"chat": [*turns, message("assistant", "a")]}], prompt_key="chat").prompts
    assert again.token_ids.tolist() == prompt.token_ids.tolist()


def test_a_template_writes_its_special_tokens_itself(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "<bos> {{ messages[0]['content'] }} ="
    (prompt,) = load(tmp_path, [{"messages": [message("user", "3 1")]}], tokenizer).prompts
    assert prompt.token_ids.tolist() == [1, 8, 6, 4]
    expected = tokenizer.apply_chat_template([message("user", "3 1")], add_generation_prompt=True)["input_ids"]
    assert prompt.token_ids.tolist() == expected


def test_strings_and_messages_may_be_mixed(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": [message("user", "b")]}, {"prompt": "c"}]
    prompts = load(tmp_path, rows).prompts
    assert [p.token_ids.tolist() for p in prompts] == [[A], [USER, B, ASSISTANT], [C]]


def test_every_row_has_its_own_column_of_the_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"messages": [message("user", "b")]}, {"conversations": [{"from": "human", "value": "c"}]}]
    for turned in (rows, rows[::-1]):
        prompts = load(tmp_path, turned).prompts
        assert [p.token_ids.tolist() for p in prompts] == [
            {"prompt": [A], "messages": [USER, B, ASSISTANT], "conversations": [USER, C, ASSISTANT]}[next(iter(row))]
            for row in turned
        ]
    assert contains_in_order(complaint(tmp_path, [*rows, {"text": "a"}]), "line 4", "'prompt'", "text")


def test_a_column_named_prompt_comes_before_messages(tmp_path: Path) -> None:
    assert load(tmp_path, [{"prompt": "a", "messages": [message("user", "b")]}]).prompts[0].text == "a"


def test_what_is_asked_is_the_same_by_any_template_and_system_message(tmp_path: Path) -> None:
    """So that runs with other ones are compared, and a run's own scores with those of ``gkd evaluate``."""

    def questions(row: dict[str, Any], **settings: Any) -> list[str]:
        loaded = load(tmp_path, [{**row, "answer": "b"}], answer_key="answer", **settings)
        return [prompt.question for prompt in loaded.prompts]

    text = questions({"prompt": "a b"})
    settings: list[dict[str, Any]] = [{"prompt_template": "b {prompt}"}, {"apply_chat_template": True}]
    assert all(questions({"prompt": "a b"}, **own) == text for own in [*settings, {"system_prompt": "a"}])
    asks = message("user", "a b")
    messages = questions({"messages": [asks]})
    for turns in ([message("system", "a"), asks], [asks, message("assistant", "b")]):
        assert questions({"messages": turns}) == questions({"messages": json.dumps(turns)}) == messages
    assert questions({"messages": [asks]}, system_prompt="b") == messages
    one = [questions({"prompt": "c", "left": left}, prompt_template="{left}") for left in ("a b", "b")]
    assert one[0] == text == questions({"n": 1, "left": "a b"}, prompt_template="{left} or {left} {x y} {{n}}")
    both = [questions({"prompt": "c", "left": "a", "n": n}, prompt_template="{left} {n}") for n in (1, 2)]
    assert questions({"left": "a", "n": 1, "m": 2}, prompt_template="{n} b {left}") == both[0]
    assert len({*text, *messages, *one[1], *both[0], *both[1], *questions({"prompt": "a"})}) == 6


def test_longer_prompts_are_counted_and_left_out(tmp_path: Path) -> None:
    prompt_set = load(tmp_path, [{"prompt": "a a a"}, {"prompt": "a a"}, {"prompt": "a a a a"}], max_prompt_length=2)
    assert ([p.id for p in prompt_set.prompts], prompt_set.n_too_long) == ([1], 2)


def test_ids_go_on_over_files_and_chunks(tmp_path: Path) -> None:
    files = []
    for name in "xy":
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "a"}\n' * 1500)
        files.append(str(tmp_path / f"{name}.jsonl"))
    assert [p.id for p in load_prompts(files, Data(), word_tokenizer()).prompts] == list(range(3000))


def test_limit(tmp_path: Path) -> None:
    assert [p.id for p in load(tmp_path, [{"prompt": "a"}] * 5, limit=3).prompts] == [0, 1, 2]


def test_every_prompt_too_long(tmp_path: Path) -> None:
    error = complaint(tmp_path, [{"prompt": "a a a"}, {"prompt": "a a a a"}], max_prompt_length=2)
    assert contains_in_order(error, f"{tmp_path}/x.jsonl", " 2 tokens (data.max_prompt_length", " 3 tokens")


def test_a_row_without_the_prompt_or_the_answer(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "b"}, {"question": "c"}]
    error = complaint(tmp_path, rows, prompt_key="questions")
    assert contains_in_order(error, f"{tmp_path}/x.jsonl line 1", "'questions' (data.prompt_key)", "question?")
    error = complaint(tmp_path, rows, prompt_key="question", answer_key="answer")
    assert contains_in_order(error, f"{tmp_path}/x.jsonl line 2", "'answer' (data.answer_key)", "question")


def test_no_chat_template(tmp_path: Path) -> None:
    rows = [{"messages": [message("user", "a")]}]
    assert contains_in_order(complaint(tmp_path, rows, tokenizer=word_tokenizer()), "chat template", "data.prompt_key")


@pytest.mark.parametrize("value", [3, None, [], ["a"], [{"role": "user"}], {"role": "user", "content": "a"}])
def test_neither_string_nor_messages(tmp_path: Path, value: Any) -> None:
    error = complaint(tmp_path, [{"prompt": "a"}, {"prompt": value}])
    assert contains_in_order(error, f"{tmp_path}/x.jsonl line 2: 'prompt' ", "string", "role", "content")


@pytest.mark.parametrize("value", [[["a"]], {"value": "a"}])
def test_an_answer_that_no_response_could_be(tmp_path: Path, value: Any) -> None:
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "a", "answer": value}]
    assert contains_in_order(complaint(tmp_path, rows, answer_key="answer"), "line 2: 'answer' ", type(value).__name__)


def test_only_the_assistant_speaks(tmp_path: Path) -> None:
    assert "assistant" in complaint(tmp_path, [{"messages": [message("assistant", "a")]}])


def test_fields_that_only_other_messages_have_are_not_shown_to_the_template(tmp_path: Path) -> None:
    """Tables give every message all fields, null where it has none; Llama 3's template asks which are there."""
    template = (
        "{% for m in messages %}<{{ m['role'] }}> {% if 'tool_calls' in m %}"
        "{{ m.tool_calls[0].function.arguments.keys() | join(' ') }}"
        "{% else %}{{ m['content'] }}{% endif %} {% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": None}}}
    turns = [
        {"role": "user", "content": "c", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "user", "content": "d", "tool_calls": None},
    ]
    (prompt,) = load(tmp_path, [{"messages": turns}], word_tokenizer(template=template)).prompts
    assert prompt.token_ids.tolist() == [USER, C, ASSISTANT, A, USER, WORDS.index("d")]
    assert prompt.messages is not None
    assert prompt.messages[0] == {"role": "user", "content": "c"}


def test_a_template_that_refuses(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(template="{{ raise_exception('roles must\n alternate') }}")
    rows = [{"messages": [message("user", "a")]}]
    assert contains_in_order(complaint(tmp_path, rows, tokenizer=tokenizer), "chat template", "'messages': roles")


def test_a_template_that_cannot_use_the_content(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(template="{{ 'x' + messages[0]['content'] }}")
    call = {"role": "user", "content": None, "tool_calls": [{"name": "f"}]}
    rows = [{"messages": [message("user", "a")]}, {"messages": [call]}]
    error = complaint(tmp_path, rows, tokenizer=tokenizer)
    assert contains_in_order(error, f"{tmp_path}/x.jsonl line 2: ", "chat template", "'messages': ")


def test_no_tokens(tmp_path: Path) -> None:
    error = complaint(tmp_path, [{"prompt": "a"}, {"prompt": " "}])
    assert contains_in_order(error, f"{tmp_path}/x.jsonl line 2: ", "'prompt'", "no tokens")


@pytest.mark.parametrize(
    ("left", "template", "words"),
    [
        ("", None, ("no tokens",)),
        ("a \ud800 b", None, ("surrogate",)),
        ("a", "{{ raise_exception('of no use') }}", ("chat template", "of no ")),
    ],
)
def test_a_prompt_of_a_template_is_not_in_a_column(
    tmp_path: Path, left: str, template: str | None, words: tuple[str, ...]
) -> None:
    data = {"prompt_template": "{left}", "apply_chat_template": template is not None}
    error = complaint(tmp_path, [{"left": left}], tokenizer=word_tokenizer(template=template), **data)
    assert contains_in_order(error, f"{tmp_path}/x.jsonl line 1: ") and all(word in error for word in words)
    assert "data.prompt_template" in error and "'prompt'" not in error


def test_text_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": "a \\ud800 b"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl line 2: 'prompt' .*surrogate"):
        load_prompts([str(tmp_path / "a.jsonl")], Data(), word_tokenizer())


@pytest.mark.parametrize("key", ["answer", "source"])
def test_an_answer_that_no_file_could_hold_is_named(key: str, tmp_path: Path) -> None:
    row = '{"prompt": "a", "answer": "b", "source": "c"}\n'
    (tmp_path / "a.jsonl").write_text(row + row.replace(f'"{key}": "', f'"{key}": "\\ud800'))
    data = Data(answer_key="answer", teacher_key="source")
    with pytest.raises(ConfigError, match=rf"a\.jsonl line 2: '{key}' .*surrogate"):
        load_prompts([str(tmp_path / "a.jsonl")], data, word_tokenizer())


def test_content_of_text_parts_is_one_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    rows = [{"messages": [{"role": "user", "content": content}]} for content in (parts, "a b", ["a ", "b"])]
    prompts = load(tmp_path, rows).prompts
    assert [p.token_ids.tolist() for p in prompts] == [[USER, A, B, ASSISTANT]] * 3
    assert [p.messages for p in prompts] == [({"role": "user", "content": "a b"},)] * 3


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}], "image_url"),
        ([{"type": "image"}], "image"),
        ({"type": "audio", "text": "a"}, "audio"),
        ({"url": "x"}, "a dict"),
        ([{"type": "text", "text": None}], "text"),
        (5, "int"),
        (None, "null"),
        ([["a"]], "list"),
    ],
)
def test_content_that_is_no_text_is_named(content: Any, what: str, tmp_path: Path) -> None:
    rows = [{"messages": [message("user", "a")]}, {"messages": [{"role": "user", "content": content}]}]
    assert contains_in_order(complaint(tmp_path, rows), f"{tmp_path}/x.jsonl line 2: 'messages' ", f" {what}; ")


def test_a_huge_row_is_left_out_by_its_beginning(tmp_path: Path) -> None:
    """Ten million tokens take about a minute to be made."""
    tokenizer, n_characters = word_tokenizer(), []

    class Counting(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, texts: list[str], **kwargs: Any) -> Any:
            n_characters.extend(map(len, texts))
            return super().__call__(texts, **kwargs)

    tokenizer.__class__ = Counting
    prompt_set = load(tmp_path, [{"prompt": "a b " * 5_000_000}, {"prompt": "a"}], tokenizer)
    assert ([p.id for p in prompt_set.prompts], prompt_set.n_too_long) == ([1], 1)
    assert 0 < sum(n_characters) < 100_000
    rows = [{"prompt": "a " * 100_000}]
    assert complaint(tmp_path, rows, max_prompt_length=2).endswith("more than 4 tokens")


def test_long_text_of_few_tokens_is_kept(tmp_path: Path) -> None:
    texts = ["x" * 100_000, "a" + " " * 100_000 + "b", "a b"]
    prompt_set = load(tmp_path, [{"prompt": text} for text in texts], max_prompt_length=2)
    assert [p.token_ids.tolist() for p in prompt_set.prompts] == [[0], [A, B], [A, B]]


def test_a_template_that_fails_in_any_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(ConfigError, match=r"line 1: .*'messages': .*zero"):
        load_prompts([str(tmp_path / "a.jsonl")], Data(), word_tokenizer(template="{{ 1 / 0 }}"))
