"""Evaluation: sets of questions, how often and how they are asked, and on how many GPUs."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from gkd.config.base import Settings
from gkd.config.data import Data, Files
from gkd.config.open import OpenSections
from gkd.registry import Registry, absolute

STRATEGIES = Registry(
    "evaluate.strategies",
    {
        "plain": "gkd.evaluation.strategies:plain",
        "adaptive": "gkd.evaluation.looking:Adaptive",
        "fixed_k": "gkd.evaluation.looking:FixedK",
        "self_consistency": "gkd.evaluation.self_consistency:SelfConsistency",
    },
)


class EvalSet(Settings):
    """A set of questions, and how each is asked."""

    files: Files = Field([], description="the questions, in the formats of data.train_files")
    prompt_key: str = Field("prompt", description="column of the question; messages go through the chat template")
    answer_key: str | None = Field(None, description="column of the reference answer; null: as data.answer_key")
    prompt_template: str | None = Field(None, description="as data.prompt_template")
    system_prompt: str | None = Field(None, description="as data.system_prompt")
    apply_chat_template: bool | None = Field(None, description="as data.apply_chat_template")
    chat_template_kwargs: dict[str, Any] = Field({}, description="as data.chat_template_kwargs")
    samples: int = Field(
        1, ge=1, description="answers a question (verl's val_kwargs.n, slime's n_samples_per_eval_prompt)"
    )
    temperature: float = Field(0.0, ge=0, le=1e3, description="temperature of the answers; 0: the likeliest token")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus that answers are sampled from")
    max_response_length: int | None = Field(
        None, ge=1, description="tokens an answer may have; null: rollout.max_response_length"
    )
    limit: int | None = Field(None, ge=1, description="questions used at most, the first ones; null: all")
    rewards: list[str] = Field(
        [], description="rewards to measure besides accuracy, as in reward.functions; their settings are in reward.NAME"
    )
    pass_k: list[Annotated[int, Field(ge=1)]] = Field(
        [], description="k of pass@k, each at most samples; empty: samples, where there are several"
    )
    difficulty: str | None = Field(None, description="column to split the scores by")

    @model_validator(mode="after")
    def _questions_can_be_asked(self) -> EvalSet:
        if not self.files:
            raise ValueError("files is empty: where are the questions?")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(f"samples={self.samples} at temperature=0 are all alike: set temperature, such as 0.7")
        if over := [k for k in self.pass_k if k > self.samples]:
            raise ValueError(f"pass_k={over[0]} needs as many samples, and there are {self.samples} (samples)")
        self.data(1)  # the settings of prompts are checked there
        return self

    def data(self, max_prompt_length: int) -> Data:
        """Return the settings of data that the set stands for."""
        return Data(
            prompt_key=self.prompt_key,
            answer_key=self.answer_key,
            prompt_template=self.prompt_template,
            system_prompt=self.system_prompt,
            apply_chat_template=self.apply_chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            max_prompt_length=max_prompt_length,
        )


class Evaluate(OpenSections):
    """What gkd evaluate asks the models, and where it writes."""

    registry: ClassVar[Registry] = STRATEGIES
    selects: ClassVar[str] = "strategies"

    sets: dict[str, EvalSet] = Field({}, description="sets of questions, by name")
    output_dir: str = Field(
        "outputs/evaluate",
        description="where answers.jsonl and results/ are; answers that are there already are not asked for again",
    )
    mode: Literal["auto", "single", "data_parallel", "sharded"] = Field(
        "auto",
        description="GPUs that answer: auto: all, with the fewest for one engine that the plan says it fits on; "
        "single: one engine of rollout.tensor_parallel_size GPUs; data_parallel: as many such engines as there is room "
        "for; sharded: one engine over all GPUs of a node",
    )
    strategies: Annotated[list[str], AfterValidator(lambda names: [absolute(name) for name in names])] = Field(
        ["plain"],
        description=f"how a question is answered: {', '.join(STRATEGIES.names())}, or your own as package.module:name "
        "or FILE.py:name; each is measured on the same questions, and its settings are in evaluate.NAME",
    )

    @model_validator(mode="after")
    def _strategies_are_there(self) -> Evaluate:
        if not self.strategies or len(set(self.strategies)) != len(self.strategies):
            raise ValueError("strategies names none, or one twice")
        for name in self.strategies:
            if not callable(STRATEGIES.load(name)):
                raise ValueError(f"strategies: {name} is no function and no class")
        if not self.output_dir.strip():
            raise ValueError("output_dir is empty: name a directory")
        return self
