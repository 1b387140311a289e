"""From a row to the student's prompt: a prompt template, a system prompt, the tokenizer's chat template."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gkd.config import Data
from gkd.config.data import PLACE
from gkd.config.eval_set import EvalSet
from gkd.data.layouts import is_messages, messages_to_answer, prompt_of, template_variables, tools_of
from gkd.data.row import Row, is_missing
from gkd.errors import ConfigError, one_line
from gkd.types import Prompt

log = logging.getLogger("gkd")


def question_of(row: Row, key: str, data: Data) -> Any:
    """Return the question of a row: text for the model as it is, or messages for the chat template.

    Text goes into ``data.prompt_template``, and is a user's message where ``data.apply_chat_template`` or
    ``data.system_prompt`` is set. Raises ConfigError as :func:`gkd.data.layouts.prompt_of`, and for a template that
    names what the row has not.
    """
    value = prompt_of(row, key) if data.prompt_template is None else _fill(row, data.prompt_template)
    if isinstance(value, str) and data.uses_chat_format:
        value = [{"role": "user", "content": value}]
    if data.system_prompt is None or not is_messages(value):
        return value  # what is neither text nor messages is refused as that
    if value[0]["role"] != "system":
        value = [{"role": "system", "content": data.system_prompt}, *value]
    return value


def render(row: Row, key: str, messages: Sequence[Mapping[str, Any]], tokenizer: Any, data: Data) -> str:
    """Return the text that the chat template makes of ``messages``, ready for the assistant's turn.

    Raises ConfigError, naming the row, where there is no template or it refuses them.
    """
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"{row.place}: {key!r} holds messages, but the tokenizer of {tokenizer.name_or_path} has no chat template: "
            "write one into chat_template.jinja there, or name a column of text (data.prompt_key, data.prompt_template)"
        )
    question = messages_to_answer(messages)
    if not question:
        raise ConfigError(f"{row.place}: {key!r} holds only the assistant's messages, so there is no prompt")
    kwargs = template_variables(data.chat_template_kwargs, tools_of(row))
    try:
        return str(tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False, **kwargs))
    except Exception as error:  # a template computes with what the messages hold, and raises what it meets
        raise ConfigError(f"{row.place}: the chat template refuses {key!r}: {one_line(error)}") from None


def require_template(tokenizer: Any, data: Data) -> None:
    """Raise ConfigError for settings of a chat template that the tokenizer's does not have."""
    template = chat_template_of(tokenizer)
    settings = {
        "data.system_prompt": data.system_prompt is not None,
        "data.apply_chat_template=true": bool(data.apply_chat_template),
        "data.chat_template_kwargs": bool(data.chat_template_kwargs),
    }
    for setting in (setting for setting, is_set in settings.items() if is_set):
        if template is None:
            raise ConfigError(f"{setting}: the tokenizer of {tokenizer.name_or_path} has no chat template")
    for name in data.chat_template_kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", template or ""):
            raise ConfigError(
                f"data.chat_template_kwargs.{name}: the chat template of {tokenizer.name_or_path} does not look at it"
            )


def chat_template_of(tokenizer: Any, for_tools: bool = False) -> str | None:
    """Return the chat template that ``apply_chat_template`` takes: of several by name the default one.

    ``for_tools``: where prompts have tools, the one for these; None where that is no other.
    """
    template = tokenizer.chat_template
    if not isinstance(template, dict):
        return None if for_tools else template
    template_text: str | None = template.get("tool_use" if for_tools else "default")
    return template_text


def warn_of_raw_text(
    model: str, tokenizer: Any, settings: Data | EvalSet, section: str, prompts: Mapping[str, Iterable[Prompt]]
) -> bool:
    """Warn where ``model``, trained to chat, is given plain text, as it has never seen it; returns whether it is so.

    ``section``: where ``settings`` are, and with them the files that ``prompts`` are named by.
    ``apply_chat_template=false`` there states that it is meant.
    """
    raw = [
        f"{section}.{files}"
        for files, file_prompts in prompts.items()
        if any(prompt.messages is None for prompt in file_prompts)
    ]
    if not raw or chat_template_of(tokenizer) is None or settings.apply_chat_template is not None:
        return False
    log.warning(
        "%s has a chat template, and %s hold plain text, which it gets as it is: %s.apply_chat_template=true (or "
        "%s.system_prompt=TEXT) asks it in a chat, false says that it is meant",
        *(model, " and ".join(raw), section, section),
    )
    return True


def special_ids_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return ids of the special tokens that a tokenizer puts before and after plain text, without an end token.

    A model that is asked to go on behind an end token begins anew.
    """
    plain, whole = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    starts = [i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain]
    if not plain or not starts:  # it has no token for this text
        bos = getattr(tokenizer, "bos_token_id", None)
        return [i for i in whole[:1] if i == bos], []
    end = getattr(tokenizer, "eos_token_id", None)
    return list(whole[: starts[0]]), [i for i in whole[starts[0] + len(plain) :] if i != end]


def begins_itself(text: str, bos: str | None) -> bool:
    """Return whether plain text has its special tokens in it: it begins with ``bos``, as what a template made does."""
    return bool(bos) and text.startswith(str(bos))


def columns_of(row: Row, template: str) -> list[str]:
    """Return the columns whose values ``template`` takes from ``row``, in the order of their places."""
    names = [_column_at(place, row) for place in PLACE.finditer(template)]
    return list(dict.fromkeys(name for name in names if name is not None))


def _column_at(place: re.Match[str], row: Row) -> str | None:
    """Return the column that a place is for, None where it is text, as doubled braces and \\boxed{your answer}."""
    name: str | None = place["name"]
    return place["text"] if name is None and place["text"] in row.values else name


def _fill(row: Row, template: str) -> str:
    def value_of(place: re.Match[str]) -> str:
        name = _column_at(place, row)
        if name is None:
            return place[0][1:-1] if place[0].startswith("{{") else place[0]
        value = row.get(name, "data.prompt_template")
        if is_missing(value) or not isinstance(value, str | int | float):
            kind = "null" if value is None else str(value) if isinstance(value, float) else type(value).__name__
            raise ConfigError(f"{row.place}: {name!r} is {kind}, which data.prompt_template cannot hold")
        return str(value)

    if not columns_of(row, template):
        raise ConfigError(f"{row.place} has no column that data.prompt_template={template!r} names")
    return PLACE.sub(value_of, template)
