"""A set of questions, for evaluations and for validation in training."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gkd.config.base import Settings
from gkd.config.registry import EntryNames


def _require_names(files: list[str]) -> list[str]:
    """Raise ValueError for an empty name, as of a shell's variable that is not set: it would be this directory's."""
    if not all(file.strip() for file in files):
        raise ValueError("a file has no name: is a variable of the shell empty?")
    return files


Files = Annotated[list[str], AfterValidator(_require_names)]


class EvalSet(Settings):
    """A set of questions, and how each is asked."""

    files: Files = Field([], description="the questions, in the formats of data.train_files")
    prompt_key: str = Field("prompt", description="column of the question; messages go through the chat template")
    answer_key: str | None = Field(
        None, description="column of the reference answer; null: verl's reward_model.ground_truth"
    )
    prompt_template: str | None = Field(None, description="as data.prompt_template, of this set alone")
    system_prompt: str | None = Field(None, description="as data.system_prompt, of this set alone")
    apply_chat_template: bool | None = Field(None, description="as data.apply_chat_template, of this set alone")
    chat_template_kwargs: dict[str, Any] = Field({}, description="as data.chat_template_kwargs, of this set alone")
    samples: int = Field(
        1, ge=1, description="answers a question (verl's val_kwargs.n, slime's n_samples_per_eval_prompt)"
    )
    temperature: float = Field(0.0, ge=0, le=1e3, description="temperature of the answers; 0: the likeliest token")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus that answers are sampled from")
    top_k: int | None = Field(None, ge=1, description="as rollout.top_k")
    min_p: float = Field(0.0, ge=0, le=1, description="as rollout.min_p")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="as rollout.presence_penalty")
    stop: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None, description="texts that end an answer; null: rollout.stop"
    )
    max_response_length: int | None = Field(
        None, ge=1, description="tokens an answer may have; null: rollout.max_response_length"
    )
    limit: int | None = Field(None, ge=1, description="questions used at most, the first ones; null: all")
    rewards: EntryNames = Field(
        [], description="rewards to measure besides accuracy, as in reward.functions; their settings are in reward.NAME"
    )
    pass_k: list[Annotated[int, Field(ge=1)]] = Field(
        [], description="k of pass@k, each at most samples; empty: samples, where there are several"
    )
    every: int | None = Field(
        None, ge=1, description="of data.val_sets: measured every so many steps; null: as trainer.val_every"
    )
    difficulty: str | None = Field(None, description="column to split the scores by")
    difficulties: list[Annotated[str, BeforeValidator(str)]] | None = Field(
        None, min_length=1, description="values in that column whose questions are used, as [easy,medium]; null: all"
    )

    @model_validator(mode="after")
    def _questions_can_be_asked(self) -> EvalSet:
        if not self.files:
            raise ValueError("files is empty: where are the questions?")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(f"samples={self.samples} at temperature=0 are all alike: set temperature, such as 0.7")
        if over := [k for k in self.pass_k if k > self.samples]:
            raise ValueError(f"pass_k={over[0]} needs as many samples, and there are {self.samples} (samples)")
        if self.difficulties is not None and self.difficulty is None:
            raise ValueError(f"difficulties={self.difficulties} are values in a column: difficulty is to name it")
        return self
