"""Asks models behind OpenAI-compatible endpoints, with the parameters that each takes."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import AsyncOpenAI

OTHER_NAMES = {"max_tokens": "max_completion_tokens"}
"""Parameters that OpenAI's reasoning models take by another name only, which other servers do not all know."""


class ChatModel:
    """A model behind ``client``; what it has refused once is not sent again.

    ``dispensable``: parameters that are left out where it refuses them.
    """

    def __init__(self, client: AsyncOpenAI, dispensable: Collection[str] = ()) -> None:
        self._client, self._dispensable = client, dispensable
        self._refused: set[str] = set()

    async def complete(self, **request: Any) -> Any:
        """Return a chat completion. Raises openai's errors."""
        from openai import BadRequestError

        while True:
            left_out = self._refused - OTHER_NAMES.keys()
            body = {self._name(key): value for key, value in request.items() if key not in left_out}
            try:
                return await self._client.chat.completions.create(**body)
            except BadRequestError as error:
                name = error.param
                if not isinstance(name, str) or name not in body.keys() & {*OTHER_NAMES, *self._dispensable}:
                    raise
                self._refused.add(name)

    def _name(self, parameter: str) -> str:
        return OTHER_NAMES.get(parameter, parameter) if parameter in self._refused else parameter
