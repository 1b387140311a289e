"""What the columns of a row mean, in the layouts that data for TRL, verl and ShareGPT has.

TRL: a column ``prompt`` or ``messages``, text or messages with ``role`` and ``content``. ShareGPT: ``conversations``
with ``from`` and ``value``, and perhaps a column ``system``. verl: ``prompt`` with messages, and the answer in
``reward_model.ground_truth``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from typing import Any, TypeGuard

from gkd.config import Data
from gkd.data.row import Row, is_missing
from gkd.errors import ConfigError

VERL_ANSWER = "reward_model.ground_truth"
SHAREGPT_COLUMN = "conversations"
TOOLS_COLUMN = "tools"
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "system": "system",
}
_PRINTED_MESSAGES = re.compile(r"\s*\[\s*\{\s*'(?:role|content|from|value)'\s*:")
MEDIA_COLUMNS = ("image", "images", "audio", "audios", "video", "videos")


def prompt_key(row: Row, data: Data) -> str:
    """Return ``data.prompt_key``, or the column of messages that a row has where the default one is not there."""
    default = Data.model_fields["prompt_key"].default
    if data.prompt_key == default and default not in row.values:
        return next((key for key in ("messages", SHAREGPT_COLUMN) if key in row.values), default)
    return data.prompt_key


def prompt_of(row: Row, key: str) -> Any:
    """Return the prompt in column ``key``: text, or messages with role and content, each content as one text.

    What is null in a message is left out, as tables have it of every field that another message has. Messages may be
    written as JSON, as they are in CSV.

    Raises ConfigError for a missing column, and for content that is no text, of which a template would write what
    Python prints.
    """
    value = _decode_messages(row.get(key, "data.prompt_key"))
    if isinstance(value, str) and _PRINTED_MESSAGES.match(value):
        raise ConfigError(
            f"{row.place}: {key!r} holds messages as Python prints them, which pandas writes into CSV: write them as "
            "JSON, or the file as JSONL or Parquet"
        )
    if _is_sharegpt(value):
        value = _from_sharegpt(row, key, value)
    if not has_objects(value) or not all("content" in m for m in value):
        return value
    return [{**_without_nulls(m), "content": _content(row, key, m)} for m in value]


def answers_of(row: Row, data: Data) -> tuple[str, ...]:
    """Return the reference answers of a row, any of which is right; none where it has none.

    They are in ``data.answer_key``: text, a number, a list of these, or messages, of which the assistant's last is the
    answer. Without that setting they are where verl has them, unless a mapping is there, which is for a reward of
    verl's kind. Raises ConfigError for a missing column and for values that are no answer.
    """
    key = data.answer_key
    value = _decode_messages(row.find(VERL_ANSWER) if key is None else row.get(key, "data.answer_key"))
    if key is None and any(isinstance(part, dict) for part in (value if isinstance(value, list) else [value])):
        return ()
    key = key or VERL_ANSWER
    if _is_sharegpt(value):
        value = _from_sharegpt(row, key, value)
    if is_messages(value):
        last = value[-1]
        value = _content(row, key, last) if last["role"] == "assistant" else None
    answers = value if isinstance(value, list) else [value]
    for answer in answers:
        if isinstance(answer, list | dict | bytes):
            kind = type(answer).__name__
            raise ConfigError(
                f"{row.place}: {key!r} is or holds a {kind}; an answer is text, a number, a list of these, or messages"
            )
    texts = [str(answer) for answer in answers if not is_missing(answer)]
    return tuple(text for text in texts if text.strip())  # an empty field of a table is none


def tools_of(row: Row) -> tuple[dict[str, Any], ...]:
    """Return the tools of a row, as JSON schemas: its column ``tools``, a list of them or the text of one in JSON.

    None where it has no such column or nothing in it. Raises ConfigError for anything else.
    """
    value = row.values.get(TOOLS_COLUMN)
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = [value]
    if is_missing(value) or not value:
        return ()
    if not has_objects(value):
        raise ConfigError(
            f"{row.place}: {TOOLS_COLUMN!r} is neither a list of JSON schemas nor one as JSON; the chat template is "
            "given it as the tools that there are, so what is none needs another name"
        )
    return tuple(_without_nulls(tool) for tool in value)


_STATED: dict[str, date] = {}
"""What chat templates of this process are given as the day."""


def state_day(day: date) -> None:
    """Give ``day`` from now on to chat templates that state one (``strftime_now``), as Llama 3.2's.

    A run's prompts are those of the day on which it began, also where it goes on on another one.
    """
    _STATED["day"] = day


def get_stated_day() -> date:
    """Return the day that chat templates are given: today where none is set."""
    return _STATED.get("day", date.today())


def template_variables(kwargs: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a chat template is given beside messages: the day, ``kwargs``, and a row's tools where it has any."""
    variables = {"strftime_now": datetime.combine(get_stated_day(), time()).strftime, **kwargs}
    return {**variables, "tools": [dict(tool) for tool in tools]} if tools else variables


def messages_to_answer(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages without the assistant's at their end."""
    question = list(messages)
    while question and question[-1]["role"] == "assistant":
        question.pop()
    return question


def has_objects(value: Any) -> bool:
    """Return whether ``value`` is a list of objects, one or more."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def is_messages(value: Any) -> TypeGuard[list[Any]]:
    """Return whether ``value`` is a list of messages, of which each has a role and content."""
    return has_objects(value) and all(isinstance(m.get("role"), str) and "content" in m for m in value)


def is_conversation(value: Any) -> bool:
    """Return whether ``value`` is a list of messages, with role and content or as ShareGPT has them."""
    return _is_sharegpt(value) or is_messages(value)


def require_text_alone(row: Row) -> None:
    """Raise ConfigError for a row with a picture, sound or film, without which its question is another."""
    for column in MEDIA_COLUMNS:
        if row.values.get(column):
            raise ConfigError(
                f"{row.place}: {column!r} is not empty, and only text is trained on; leave rows with images, audio and "
                "video out, or the column where the questions do not need it"
            )


def _decode_messages(value: Any) -> Any:
    """Return the messages that a text is in JSON; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        decoded = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return decoded if is_conversation(decoded) else value


def _is_sharegpt(value: Any) -> bool:
    return has_objects(value) and all({"from", "value"} <= set(m) for m in value)


def _from_sharegpt(row: Row, key: str, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with role and content that ``turns`` are, the row's system prompt first."""
    messages = []
    for turn in turns:
        role = SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
        if role is None:
            roles = ", ".join(SHAREGPT_ROLES)
            raise ConfigError(f"{row.place}: {key!r} has a turn from {turn['from']!r}; known are {roles}")
        messages.append({"role": role, "content": turn["value"]})
    system = row.values.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _content(row: Row, key: str, message: Mapping[str, Any]) -> Any:
    content = message["content"]
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type", "a dict") if isinstance(part, dict) else type(part).__name__
            form = "null" if part is None else kind
            raise ConfigError(
                f"{row.place}: {key!r} has a message whose content is not text but {form}; only text is trained on"
            )
        texts.append(text)
    return "".join(texts)
