"""What is a chat completion, and what is none."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from gkd.rewards.chat import ChatReply, NoCompletion, read_reply


def make_body(content: Any, **further: Any) -> str:
    message = {"role": "assistant", "content": content}
    return json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "message": message}], **further})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("4", "4"),
        (None, ""),
        ([{"type": "text", "text": "4"}, {"type": "text", "text": "2"}], "42"),
        ([{"type": "thinking", "thinking": [{"type": "text", "text": "7?"}]}, {"type": "text", "text": "4"}], "4"),
    ],
)
def test_a_text_may_have_parts(content: Any, text: str) -> None:
    assert read_reply(make_body(content, usage={"completion_tokens": 3})) == ChatReply(text, 3, False)


@pytest.mark.parametrize("further", [{}, {"usage": None}, {"usage": {"prompt_tokens": 1}}])
def test_tokens_that_are_not_counted_are_not_known(further: dict[str, Any]) -> None:
    assert math.isnan(read_reply(make_body("4", **further)).n_tokens)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[1, 2]",
        "<html>please\nlog in</html>",
        '{"error": {"message": "no credit"}}',
        '{"choices": []}',
        '{"choices": null}',
        '{"choices": [{"message": null}]}',
        make_body(7),
        make_body(["4"]),
        make_body([{"type": "text", "text": None}]),
        "[" * 100_000,
    ],
)
def test_what_is_none_is_shown(body: str) -> None:
    with pytest.raises(NoCompletion) as refused:
        read_reply(body)
    assert str(refused.value) == body
