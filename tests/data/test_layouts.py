"""Rows as TRL, ShareGPT and verl have them."""

from __future__ import annotations

from typing import Any

import pytest

from gkd.config import Data
from gkd.data.layouts import answers_of, prompt_key, prompt_of, require_text_alone
from gkd.data.row import Row
from gkd.errors import ConfigError

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}
SHAREGPT = {
    "conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}],
    "system": "Be brief.",
}
TURNS = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": [{"type": "text", "text": "2"}]}]


def read(values: dict[str, Any], **data: Any) -> tuple[Any, tuple[str, ...]]:
    row, settings = Row(values, "x line 1"), Data(**data)
    return prompt_of(row, prompt_key(row, settings)), answers_of(row, settings)


def test_verl() -> None:
    assert read(VERL) == (VERL["prompt"], ("2",))
    assert read(VERL, answer_key="extra_info.split")[1] == ("train",)


@pytest.mark.parametrize("turns", [TURNS, SHAREGPT["conversations"]])
def test_messages_that_python_printed_are_no_text(turns: Any) -> None:
    """As pandas has lists in CSV: the model would be asked the brackets."""
    with pytest.raises(ConfigError, match=r"x line 1: 'prompt' .*JSON"):
        read({"prompt": str(turns)})
    assert read({"prompt": "[{'a': 1}] is what?"})[0] == "[{'a': 1}] is what?"


@pytest.mark.parametrize("truth", [{"target": 98, "numbers": [44, 19, 35]}, [{"target": ["Paris"]}]])
def test_a_ground_truth_that_only_verls_own_reward_understands_is_no_answer(truth: Any) -> None:
    row = {**VERL, "reward_model": {"style": "rule", "ground_truth": truth}}
    assert read(row) == (VERL["prompt"], ())
    with pytest.raises(ConfigError, match=r"'reward_model.ground_truth' .*dict"):
        read(row, answer_key="reward_model.ground_truth")


def test_sharegpt() -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}
    messages = [system, user, {"role": "assistant", "content": "2"}]
    assert read(SHAREGPT) == (messages, ())
    assert read(SHAREGPT, answer_key="conversations") == (messages, ("2",))
    with pytest.raises(ConfigError, match=r"'conversations' .*'observation'"):
        read({"conversations": [{"from": "observation", "value": "x"}]})


@pytest.mark.parametrize("speaker", ["narrator", ["human"], None])
def test_a_turn_from_somebody_unknown_is_refused(speaker: Any) -> None:
    with pytest.raises(ConfigError, match=r"x line 1: 'conversations' .*from .*human"):
        read({"conversations": [{"from": speaker, "value": "1 + 1?"}]})


def test_the_assistants_last_message_is_the_answer_where_asked() -> None:
    assert read({"messages": TURNS})[1] == ()
    assert read({"messages": TURNS}, answer_key="messages")[1] == ("2",)
    assert read({"messages": TURNS[:1]}, answer_key="messages")[1] == ()
    assert read({"prompt": TURNS[:1], "completion": TURNS[1:]}, answer_key="completion") == (TURNS[:1], ("2",))


@pytest.mark.parametrize(
    ("value", "answers"),
    [
        (["a", 2, None], ("a", "2")),
        ([], ()),
        (None, ()),
        (0, ("0",)),
        (0.5, ("0.5",)),
        (float("nan"), ()),
        ([float("inf"), "a", float("nan")], ("a",)),
        ("", ()),
        (["a", " \n", "b "], ("a", "b ")),
    ],
)
def test_several_answers(value: Any, answers: tuple[str, ...]) -> None:
    assert read({"prompt": "q", "a": value}, answer_key="a")[1] == answers


@pytest.mark.parametrize("value", [b"a", [b"a"]])
def test_bytes_are_no_answer(value: Any) -> None:
    """A binary column of Parquet: Python would write it as b'a'."""
    with pytest.raises(ConfigError, match=r"x line 1: 'a' .*bytes"):
        read({"prompt": "q", "a": value}, answer_key="a")


@pytest.mark.parametrize("column", ["image", "images", "audio", "videos"])
def test_pictures_and_sound_are_refused_by_name(column: str) -> None:
    require_text_alone(Row({"prompt": "a", column: None}, "x line 1"))
    require_text_alone(Row({"prompt": "a", column: []}, "x line 1"))
    with pytest.raises(ConfigError, match=f"x line 1: '{column}'"):
        require_text_alone(Row({"prompt": "a", column: [{"bytes": b"x"}]}, "x line 1"))
