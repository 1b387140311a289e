"""The data's own answers as responses, and the token that ends one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gkd.data.model_info import ModelInfo
from gkd.data.prompts import TOKENISED_AT_ONCE
from gkd.errors import ConfigError
from gkd.types import Prompt

_CONTENT = "gkd"  # of the assistant's turn that is rendered to see what follows it


def turn_end(prompts: Sequence[Prompt], tokenizer: Any) -> int | None:
    """Return the token that the chat template ends an assistant's turn with, such as ``<|im_end|>``.

    It is the first special token after the turn's content; white space beside it is not part of a response, which ends
    with that token. None where no prompt went through the template, or it ends turns without a token of their own, or
    takes no assistant's turn after the first prompt.
    """
    messages = next((prompt.messages for prompt in prompts if prompt.messages is not None), None)
    return None if messages is None else _end_after(messages, tokenizer)


def template_end(tokenizer: Any) -> int | None:
    """Do as :func:`turn_end` after a user's message; None for a tokenizer without a chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    return _end_after([{"role": "user", "content": "?"}], tokenizer)


def _end_after(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> int | None:
    turns = [*messages, {"role": "assistant", "content": _CONTENT}]
    try:
        text = str(tokenizer.apply_chat_template(turns, add_generation_prompt=False, tokenize=False))
    except Exception:  # a template raises whatever it meets
        return None
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    after = tokenizer(text.rpartition(_CONTENT)[2], add_special_tokens=False)["input_ids"]
    return next((int(token) for token in after if token in special), None)


def with_turn_end(model: ModelInfo, end: int | None) -> ModelInfo:
    """Return ``model`` with ``end`` among its end tokens: a base model's settings need not name it."""
    return model if end is None else replace(model, eos_ids=sorted({*model.eos_ids, end}))


def with_answers(
    prompts: Sequence[Prompt], tokenizer: Any, model: ModelInfo, end: int | None, max_tokens: int
) -> list[Prompt]:
    """Return prompts with their answers as responses of at most ``max_tokens``: the text as it is, and the end token.

    That is ``end`` after a prompt that went through the chat template, else the tokenizer's own. An answer that is cut
    has no end; a prompt without an answer stays as it is. Raises ConfigError where there is no end token.
    """
    if not model.eos_ids:
        raise ConfigError("the model has no end token, so the data's answers, which are learned from, have no end")
    plain = model.eos_ids[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    prompts_with_answers = []
    for start in range(0, len(prompts), TOKENISED_AT_ONCE):
        part = prompts[start : start + TOKENISED_AT_ONCE]
        texts = [prompt.answer or "" for prompt in part]
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for prompt, token_ids in zip(part, encoded, strict=True):
            if prompt.answer is None:
                prompts_with_answers.append(prompt)
                continue
            ids = [*token_ids, plain if end is None or prompt.messages is None else end][:max_tokens]
            prompts_with_answers.append(replace(prompt, answer_ids=np.asarray(ids, dtype=np.int32)))
    return prompts_with_answers
