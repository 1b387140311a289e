"""Prompts: where they are, or which task makes them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gkd.config.open import OpenSections
from gkd.registry import Registry, absolute

TASKS = Registry("data.task", {"sort_digits": "gkd.recipes.sort_digits.task:SortDigits"})


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Files = Annotated[list[str], BeforeValidator(_as_list)]


class Data(OpenSections):
    """Prompts."""

    registry: ClassVar[Registry] = TASKS
    selects: ClassVar[str] = "task"

    task: Annotated[str | None, AfterValidator(lambda name: name and absolute(name))] = Field(
        None,
        description=f"what makes models and data where no model is named: {', '.join(TASKS.names())}, the default "
        "then, or your own as package.module:name or FILE.py:name; its settings are in data.NAME",
    )
    cache_dir: str | None = Field(None, description="where a task keeps what it made; null: ~/.cache/gkd")
    train_files: Files = Field(
        [],
        description="JSONL, JSON, CSV, Parquet, datasets directories, or names in the local Hugging Face cache such as "
        "openai/gsm8k:main:train; empty: data.task's",
    )
    val_files: Files = Field([], description="held-out prompts, same formats")
    prompt_key: str = Field(
        "prompt",
        description="column of the prompt (OpenRLHF's input_key); messages go through the chat template; a.b is b "
        "within the column a",
    )
    answer_key: str | None = Field(
        None,
        description="column of the reference answer (slime's label_key), or of several that are right; of messages it "
        "is the assistant's last; null: verl's reward_model.ground_truth, and without it no accuracy is measured",
    )
    teacher_key: str | None = Field(None, description="column that says which of teacher.models a prompt is for")
    max_prompt_length: int = Field(1024, ge=1, description="longer prompts are counted and left out, tokens")
    val_limit: int = Field(256, ge=1, description="validation prompts used at most")
    val_top_k: int = Field(
        512,
        ge=1,
        description="teacher's K most likely tokens that val/reverse_kl compares, and one bucket for the rest: a lower "
        "bound, exact where K is the vocabulary",
    )

    @model_validator(mode="after")
    def _task_makes_models_and_data(self) -> Data:
        kind = None if self.task is None else TASKS.load(self.task)
        if kind is not None and not (
            isinstance(kind, type) and hasattr(kind, "make") and hasattr(kind, "model_configs")
        ):
            raise ValueError(f"task: {self.task} is no class with the methods make and model_configs")
        return self
