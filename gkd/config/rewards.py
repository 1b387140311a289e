"""Rewards: which, how much each counts, and what each can be told."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from gkd.config.base import Settings
from gkd.registry import absolute

REWARD_MODEL = "reward_model"
BUILTIN_REWARDS = ("accuracy", "cosine", "format", "judge", "length", "reasoning_steps", "repetition_penalty")
NEED_ANSWERS = ("accuracy", "cosine")


def _regular(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return pattern


def _absolute(functions: list[str]) -> list[str]:
    """Rewards' names with absolute paths: what a worker's own directory is does not matter."""
    return [absolute(name) for name in functions]


class FormatReward(Settings):
    """1 where a pattern is found."""

    pattern: Annotated[str, AfterValidator(_regular)] = Field(
        r"^<think>.+</think>\s*<answer>.+</answer>\s*$", description="regular expression; a dot is also a line's end"
    )


class ReasoningStepsReward(Settings):
    """A share for every marked step."""

    wanted: int = Field(3, ge=1, description="steps that give the full reward")


class CosineReward(Settings):
    """Accuracy scaled by length."""

    right: list[float] = Field([1.0, 0.5], min_length=2, max_length=2, description="right: empty, and at the limit")
    wrong: list[float] = Field([-1.0, -0.5], min_length=2, max_length=2, description="wrong: empty, and at the limit")


class RepetitionReward(Settings):
    """A penalty for repeated n-grams."""

    n: int = Field(3, ge=1, description="words of an n-gram")
    largest: float = Field(1.0, gt=0, description="the penalty when nothing is new")


class LengthReward(Settings):
    """Shorter is better, or nearer to a length."""

    wanted: int | None = Field(None, ge=1, description="tokens that give 1; null: the fewer the better")


class JudgeReward(Settings):
    """What another language model says of the answer, asked over an OpenAI-compatible endpoint."""

    url: str | None = Field(None, description="base URL of the endpoint, such as http://HOST:8000/v1")
    model: str | None = Field(None, description="name of the model there")
    api_key_env: str = Field("OPENAI_API_KEY", description="environment variable on the rollout nodes with the key")
    prompt: str = Field(
        "Rate the response to the question from 0 (useless) to 10 (perfect). Say only the number.\n\n"
        "Question:\n{prompt}\n\nResponse:\n{response}\n",
        description="what is asked; {prompt}, {response} and {answer} are filled in",
    )
    scale: float = Field(10.0, gt=0, description="the mark that gives a reward of 1")
    max_tokens: int = Field(16, ge=1, description="tokens the judge may answer with")
    timeout_s: float = Field(4.0, gt=0, description="time one attempt has, within reward.timeout_s for all of them")
    retries: int = Field(1, ge=0, description="further attempts after one that failed")
    slow_s: float = Field(6.0, gt=0, description="mean time of a step's marks beyond which a warning is given")


class Reward(Settings):
    """What a response is worth: the weighted sum of functions."""

    functions: Annotated[list[str], AfterValidator(_absolute)] = Field(
        [],
        description=f"any of {', '.join(BUILTIN_REWARDS)}; reward_model, a model in a group of its own; or your own "
        "as package.module:name or FILE.py:name",
    )
    weights: list[float] | None = Field(None, description="how much each function counts; null: 1 each")
    timeout_s: float = Field(10.0, gt=0, description="time one function has for one sample")
    workers: int = Field(2, ge=1, description="processes beside each rollout engine that compute rewards")
    max_failed_share: float = Field(0.2, ge=0, le=1, description="share of a step's samples beyond which the run ends")
    format: FormatReward = FormatReward()
    reasoning_steps: ReasoningStepsReward = ReasoningStepsReward()
    cosine: CosineReward = CosineReward()
    repetition_penalty: RepetitionReward = RepetitionReward()
    length: LengthReward = LengthReward()
    judge: JudgeReward = JudgeReward()

    @model_validator(mode="after")
    def _functions_and_weights_go_together(self) -> Reward:
        if len(set(self.functions)) != len(self.functions):
            raise ValueError("functions names one twice")
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ValueError(f"{len(self.weights)} weights for {len(self.functions)} functions")
        if "judge" in self.functions and (self.judge.url is None or self.judge.model is None):
            raise ValueError("the reward judge needs reward.judge.url and reward.judge.model")
        return self

    def weight_of(self) -> dict[str, float]:
        """Weight of every function."""
        return dict(zip(self.functions, self.weights or [1.0] * len(self.functions), strict=True))
