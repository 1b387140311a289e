"""Asks models behind OpenAI-compatible endpoints: with the parameters that each takes, in several attempts."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from gkd.config.endpoint import OpenAIEndpoint, hide_secrets_within
from gkd.errors import QuestionRefused, RunFailed, one_line

if TYPE_CHECKING:
    from openai import AsyncOpenAI

OTHER_NAMES = {"max_tokens": "max_completion_tokens"}
"""Parameters that OpenAI's reasoning models take by another name only, which other servers do not all know."""
NEEDS_KEY = (401, 403)
MAY_PASS = (408, 409, 429)  # beside errors of the server
MOST_SHOWN = 400
"""Characters that are shown of an endpoint's error."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0


@dataclass(frozen=True)
class ChatReply:
    """Text of a chat completion; ``n_tokens`` is NaN where the endpoint does not state it (``usage``)."""

    text: str
    n_tokens: float
    is_cut: bool


class ChatModel:
    """A model behind ``client``; what it has refused once is not sent again.

    ``section``: that of its ``settings``, for messages. ``dispensable``: parameters that are left out where it refuses
    them.
    """

    def __init__(
        self, client: AsyncOpenAI, settings: OpenAIEndpoint, section: str, dispensable: Collection[str] = ()
    ) -> None:
        self._client, self._settings, self._section, self._dispensable = client, settings, section, dispensable
        self._name = f"{section}: {settings.public_url}"
        self._refused: set[str] = set()
        self._has_answered = False

    async def complete(self, question: str, **request: Any) -> ChatReply:
        """Return a chat completion. ``question``: what messages call it.

        Each of the attempts has ``timeout_s``, all of them as often that, with the pauses between them: an attempt that
        fails early leaves its time to a pause. Raises QuestionRefused where the endpoint does not take it, and
        RunFailed, which states the last attempt, where none succeeds. One that is cancelled states it as well, in a
        note.
        """
        failures: list[str] = []
        try:
            return await self._try(question, request, failures)
        except asyncio.CancelledError as end:
            if failures:
                end.add_note(f"{self._name} {failures[-1]}")
            raise

    async def _try(self, question: str, request: dict[str, Any], failures: list[str]) -> ChatReply:
        """Make the attempts of :meth:`complete`; adds what came of each that failed to ``failures``."""
        from openai import BadRequestError, OpenAIError, UnprocessableEntityError

        clock, limit_s, n = asyncio.get_running_loop().time, self._settings.timeout_s, self._settings.retries + 1
        start = clock()
        for attempt in range(1, n + 1):
            try:
                async with asyncio.timeout(limit_s):
                    reply = read_reply(await self._ask(request))
                self._has_answered = True
                return reply
            except (BadRequestError, UnprocessableEntityError) as error:
                raise QuestionRefused(f"{self._name} refuses {question}: {self._describe(error)}") from None
            except (OpenAIError, TimeoutError, ValueError) as error:
                failures.append(f"{self._describe_failure(error)} (attempt {attempt} of {n})")
                if attempt == n or not _may_pass(error):
                    break
                left_s = max(0.0, start + attempt * limit_s - clock())  # the next attempt has all of its own
                pause = _read_requested_pause(error)
                if pause is None:
                    pause = min(_choose_pause(attempt, self._has_answered), left_s)
                elif pause > left_s:
                    setting = f"{self._section}.timeout_s={limit_s:g}"
                    failures[-1] += f"; it asks to wait {pause:.0f} s, and {setting} leaves {left_s:.0f} s"
                    break
            await asyncio.sleep(pause)
        raise RunFailed(f"{self._name} {failures[-1]}")

    async def _ask(self, request: dict[str, Any]) -> str:
        """Return the body of an answer. Raises openai's errors."""
        from openai import BadRequestError

        while True:
            left_out = self._refused - OTHER_NAMES.keys()
            body = {self._choose_sent_name(key): value for key, value in request.items() if key not in left_out}
            try:
                answer = await self._client.chat.completions.with_raw_response.create(**body)
                return str(answer.http_response.text)
            except BadRequestError as error:
                name = error.param
                if not isinstance(name, str) or name not in body.keys() & {*OTHER_NAMES, *self._dispensable}:
                    raise
                self._refused.add(name)

    def _choose_sent_name(self, parameter: str) -> str:
        return OTHER_NAMES.get(parameter, parameter) if parameter in self._refused else parameter

    def _describe_failure(self, error: Exception) -> str:
        """Return what came of an attempt."""
        if isinstance(error, TimeoutError):
            return f"did not answer within {self._settings.timeout_s:g} s ({self._section}.timeout_s)"
        if isinstance(error, NoCompletion):
            return f"answered with what is no chat completion: {self._describe(error)}"
        return f"did not answer: {self._describe(error)}"

    def _describe(self, error: Exception) -> str:
        """Return an error in one line, without what is secret of the endpoint, which is taken out before it is cut."""
        text = str(error if error.__cause__ is None else error.__cause__)  # the cause of a connection that failed
        if re.fullmatch(r"Error code: \d+", text) and (answer := getattr(error, "response", None)) is not None:
            text += f": {answer.text.strip()}"  # what openai leaves out where it is not in OpenAI's form
        for secret in self._settings.secrets():
            text = text.replace(secret, "***")
        if isinstance(error, NoCompletion):
            return repr(one_line(text)[:MOST_SHOWN])
        if len(text) > MOST_SHOWN:
            text = f"{text[:MOST_SHOWN]} ..."
        kinds = [type(exception).__name__ for exception in (error, error.__cause__) if exception is not None]
        text = one_line(": ".join([*kinds, *filter(None, [text])]))
        if getattr(error, "status_code", None) in NEEDS_KEY and not self._settings.key():
            variable = self._settings.api_key_env
            name = f"variable {variable}" if variable.isupper() else "variable"  # a key has small letters
            text += f"; the {name} ({self._section}.api_key_env) is not set where it is asked from"
        return text


def make_client(settings: OpenAIEndpoint, section: str) -> AsyncOpenAI:
    """Return a client for the endpoint of ``section``. Raises RunFailed for a proxy that it cannot use."""
    from openai import AsyncOpenAI

    try:
        return AsyncOpenAI(**settings.client_arguments())
    except (ImportError, ValueError) as error:  # httpx's, of HTTPS_PROXY, ALL_PROXY and the like
        raise RunFailed(
            f"{section}: {settings.public_url} cannot be asked: {hide_secrets_within(str(error))}"
        ) from None


class NoCompletion(ValueError):
    """An answer that is no chat completion; its message is what came."""


def read_reply(body: str) -> ChatReply:
    """Return the reply in the body of an answer. Raises NoCompletion, with the body, for one that is none."""
    try:
        completion = json.loads(body)
        choice, n_tokens = completion["choices"][0], (completion.get("usage") or {}).get("completion_tokens")
        content = choice["message"].get("content")
        if isinstance(content, list):  # also of what the model thinks, and of pictures
            content = "".join(part["text"] for part in content if part["type"] == "text")
        text = content or ""
        if not isinstance(text, str):
            raise TypeError
        counted = n_tokens if isinstance(n_tokens, int) else math.nan
        return ChatReply(text, counted, choice.get("finish_reason") == "length")
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        raise NoCompletion(body) from None


def _may_pass(error: Exception) -> bool:
    """Return whether another attempt may succeed: any failure but an answer of the kind that stays the same."""
    status = getattr(error, "status_code", None)
    return status is None or status in MAY_PASS or status >= 500


def _choose_pause(attempt: int, has_answered: bool) -> float:
    """Return the seconds to wait after an attempt, the first of which is 1, where the time left allows them.

    An endpoint that has answered before may be starting again, which takes a minute or two; one that never has is
    rather named wrong, which is to be reported soon.
    """
    growth = 8.0 if has_answered else 2.0
    return min(FIRST_PAUSE_S * growth ** min(attempt - 1, 10), LONGEST_PAUSE_S)


def _read_requested_pause(error: Exception) -> float | None:
    """Return the seconds that an answer asks to wait before the next attempt (RFC 9110, Retry-After), None without."""
    value = getattr(getattr(error, "response", None), "headers", {}).get("retry-after", "")
    seconds = math.nan
    with suppress(ValueError):
        seconds = float(value)
    if math.isnan(seconds):
        with suppress(ValueError, TypeError):
            seconds = max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return seconds if 0 <= seconds < math.inf else None
