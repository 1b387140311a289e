"""A mark given by another language model, asked over an OpenAI-compatible endpoint."""

from __future__ import annotations

import os
import re
from functools import cache

from openai import OpenAI, OpenAIError

from gkd.config import JudgeReward
from gkd.rewards.completion import Completion

_PLACE = re.compile(r"\{(prompt|response|answer)\}")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def judge(completion: Completion, options: JudgeReward) -> float:
    """The first number in the judge's answer, divided by ``options.scale``.

    Raises RuntimeError when the judge does not answer in ``options.retries`` + 1 attempts of ``options.timeout_s``, and
    ValueError when its answer has no number.
    """
    texts = {"prompt": completion.prompt, "response": completion.response, "answer": completion.answer or ""}
    asked = _PLACE.sub(lambda place: texts[place[1]], options.prompt)
    try:
        said = _client(options).chat.completions.create(
            model=options.model or "",
            messages=[{"role": "user", "content": asked}],
            max_tokens=options.max_tokens,
            temperature=0.0,
        )
    except OpenAIError as error:
        cause = error.__cause__ or error
        raise RuntimeError(f"the judge at {options.url} did not answer: {type(error).__name__}: {cause}") from None
    answer = said.choices[0].message.content or ""
    found = _NUMBER.search(answer)
    if found is None:
        raise ValueError(f"the judge gave no number but {answer[:80]!r}")
    return float(found[0]) / options.scale


@cache  # one connection a process
def _client(options: JudgeReward) -> OpenAI:
    return OpenAI(
        base_url=options.url,
        api_key=os.environ.get(options.api_key_env, "none"),
        timeout=options.timeout_s,
        max_retries=options.retries,
    )
