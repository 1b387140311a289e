"""A model behind an OpenAI-compatible endpoint, as what questions are put to."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gkd.config.evaluation import Endpoint
from gkd.evaluation.questions import Question
from gkd.evaluation.strategies import Messages, Reply
from gkd.rewards.chat import ChatModel, make_client
from gkd.types import Sampling

LONGEST = 1 << 24
"""Bytes of a question: the endpoint alone counts its tokens."""


class Bytes:
    """Stands for the tokenizer that only the endpoint has: the bytes of a text, messages as they are.

    ``variables``: what the chat template there is given beside messages.
    """

    all_special_ids: tuple[int, ...] = ()
    name_or_path = "an endpoint"

    def __init__(self, variables: Iterable[str]) -> None:
        self.chat_template = " ".join(["{{ messages }}", *variables])  # whether it looks at them is seen there

    def __call__(self, texts: str | Sequence[str], **_: Any) -> dict[str, Any]:
        """Return the bytes of each text as its tokens."""
        if isinstance(texts, str):
            return {"input_ids": list(texts.encode())}
        return {"input_ids": [list(text.encode()) for text in texts]}

    def apply_chat_template(self, messages: Sequence[Any], **_: Any) -> str:
        """Return messages as one text, which is compared and never sent."""
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


@dataclass(frozen=True)
class EndpointModel:
    """A model by the name that tables call it; ``fingerprint`` is that of its URL and name there."""

    name: str
    settings: Endpoint

    @property
    def path(self) -> str:
        """Where it is, for results."""
        return f"{self.settings.public_url} {self.settings.model}"

    @property
    def fingerprint(self) -> str:
        """Of the URL and the name alone: nothing else is known of what answers there."""
        return hashlib.sha256(f"{self.settings.url} {self.settings.model}".encode()).hexdigest()[:16]


class EndpointReplies:
    """Replies of an endpoint's chat completions, ``evaluate.endpoints.NAME.concurrency`` at the same time."""

    def __init__(self, model: EndpointModel) -> None:
        self.model = model
        self._chat: asyncio.Future[ChatModel] | None = None

    @property
    def in_flight(self) -> int:
        """The endpoint's concurrency."""
        return self.model.settings.concurrency

    async def reply(self, question: Question, prompt: str | Messages | None, sampling: Sampling, seed: int) -> Reply:
        """Ask the endpoint.

        Raises QuestionRefused for a question that it does not take, RunFailed when it does not answer in time, however
        often it is tried.
        """
        assert self._chat is not None, "work() runs before anything is asked"
        model = await self._chat
        body: dict[str, Any] = {"seed": seed} if sampling.temperature else {}
        body |= _extra_parameters(sampling, question.chat_template_kwargs)
        if tools := question.prompt.tools:  # shown to the model, whose reply is a text all the same
            body |= {"tools": list(tools), "tool_choice": "none"}
        answer = await model.complete(
            f"question {question.prompt.id + 1}",
            model=self.model.settings.model,
            messages=_messages(question, prompt),
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            **body,
        )
        text = answer.text if answer.is_cut else _close_tag(answer.text, sampling.stop)
        return Reply(text, answer.n_tokens, answer.is_cut)

    async def work(self) -> None:
        """Hold the connection until this is cancelled. Raises RunFailed where there cannot be one."""
        self._chat = asyncio.get_running_loop().create_future()
        settings, section = self.model.settings, f"evaluate.endpoints.{self.model.name}"
        async with make_client(settings, section) as client:
            self._chat.set_result(ChatModel(client, settings, section))
            await asyncio.Event().wait()


def _close_tag(text: str, stops: Sequence[str]) -> str:
    """Return a reply with the tag or the fence of a code block that ended it, as engines here have it.

    Endpoints leave it out.
    """
    for stop in stops:
        if stop.startswith("```") and text.count("```") % 2:
            return text + stop
        if stop.startswith("</") and text.count(f"<{stop[2:]}") > text.count(stop):
            return text + stop
    return text


def _extra_parameters(sampling: Sampling, chat_template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a set's settings beside temperature and nucleus; those that are no standard as vLLM's server has them."""
    standard = {"presence_penalty": sampling.presence_penalty, "stop": list(sampling.stop)}
    further = {"top_k": sampling.top_k, "min_p": sampling.min_p, "chat_template_kwargs": dict(chat_template_kwargs)}
    extra_body = {name: value for name, value in further.items() if value}
    differing = {name: value for name, value in standard.items() if value}
    return differing | ({"extra_body": extra_body} if extra_body else {})


def _messages(question: Question, prompt: str | Messages | None) -> list[Any]:
    """Return what is asked as messages: text in place of the question's last message, or as a user's."""
    if prompt is not None and not isinstance(prompt, str):
        return [dict(message) for message in prompt]
    shown = question.prompt
    if shown.messages is None:
        return [{"role": "user", "content": shown.text if prompt is None else prompt}]
    messages = [dict(message) for message in shown.messages]
    return messages if prompt is None else [*messages[:-1], {**messages[-1], "content": prompt}]
