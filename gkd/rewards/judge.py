"""A score given by another language model, over an OpenAI-compatible endpoint."""

from __future__ import annotations

import re
from functools import cached_property
from typing import ClassVar

from pydantic import Field

from gkd.config.base import WaitSeconds
from gkd.config.endpoint import OpenAIEndpoint
from gkd.rewards.answers import cut_reasoning
from gkd.rewards.chat import ChatModel, make_client
from gkd.rewards.completion import Completion, RewardFunction

_PLACE = re.compile(r"\{(prompt|response|answer)\}")
_NUMBER = re.compile(r"-?(?:\d+(?:\.\d+)?|(?<![\w.])\.\d+)")


class Judge(RewardFunction):
    """Gives the first number in the judge's answer, divided by ``scale``; what stands in ``<think>`` is no answer.

    Asynchronous: a process waits for ``reward.concurrency`` answers at a time.
    """

    class Config(OpenAIEndpoint):
        """The model, what it reads, and how long it may take."""

        prompt: str = Field(
            "Rate the response to the question from 0 (useless) to 10 (perfect). Say only the number.\n\n"
            "Question:\n{prompt}\n\nResponse:\n{response}\n",
            description="what the judge reads; {prompt}, {response} and {answer} are filled in",
        )
        scale: float = Field(10.0, gt=0, description="the score that gives a reward of 1")
        max_tokens: int = Field(16, ge=1, description="tokens the judge may answer with")
        timeout_s: WaitSeconds = Field(4.0, description="time one attempt has, within reward.timeout_s for all of them")
        retries: int = Field(1, ge=0, description="further attempts after one that failed")
        slow_s: float = Field(6.0, gt=0, description="mean time of a step's calls beyond which a warning is given")

    ends_within: ClassVar[str] = "timeout_s"
    advice_when_slow: ClassVar[str] = "lower reward.judge.max_tokens or choose a smaller reward.judge.model"
    config: Config

    async def __call__(self, completion: Completion) -> float:
        """Return the score over ``scale``.

        Raises RunFailed when the judge does not answer in ``retries`` + 1 attempts, and ValueError when its answer has
        no number.
        """
        config = self.config
        texts = {"prompt": _question_of(completion), "response": completion.response, "answer": completion.answer or ""}
        question = _PLACE.sub(lambda place: texts[place[1]], config.prompt)
        reply = await self._model.complete(
            "the question",
            model=config.model,
            messages=[{"role": "user", "content": question}],
            max_tokens=config.max_tokens,
            temperature=0.0,
        )
        score = _NUMBER.search(cut_reasoning(reply.text))
        if score is None:
            cut = f", cut at reward.judge.max_tokens={config.max_tokens}" if reply.is_cut else ""
            raise ValueError(f"the judge gave no number but {reply.text[:80]!r}{cut}")
        return float(score[0]) / config.scale

    @cached_property
    def _model(self) -> ChatModel:
        """Connect once a process. Without temperature the score is noisier, and reasoning models refuse it."""
        client = make_client(self.config, "reward.judge")
        return ChatModel(client, self.config, "reward.judge", dispensable=("temperature",))


def _question_of(completion: Completion) -> str:
    """Return what was asked: of messages their texts, as a template's special tokens would be the judge's own.

    Several are marked with their roles.
    """
    if completion.messages is None:
        return completion.prompt
    contents = [str(message["content"] or "") for message in completion.messages]
    if len(contents) == 1:
        return contents[0]
    return "\n\n".join(f"{m['role']}: {text}" for m, text in zip(completion.messages, contents, strict=True))
