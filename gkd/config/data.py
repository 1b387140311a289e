"""Prompts: where they are, or which task makes them."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator, model_validator

from gkd.config.eval_set import EvalSet, Files
from gkd.config.open import OpenSections
from gkd.config.registry import EntryName, Registry

TASKS = Registry("data.task", {"sort_digits": "gkd.recipes.sort_digits.task:SortDigits"})


PLACE = re.compile(r"\{\{[^{}]*\}\}|\{(?P<name>[^\W\d][\w.]*)\}|\{(?P<text>[^{}\n]+)\}")
"""A column's place in ``data.prompt_template``, text that is one where a row has a column of that name, with spaces
perhaps, or doubled braces."""
_TAKEN = {
    "val": "is what data.val_files are called (val/accuracy, and the set val of gkd evaluate RUN)",
    "reward": "would be shown as val/reward/NAME, which the run's own rewards are",
}
_NOT_THE_TEMPLATES = ("messages", "conversation", "chat_template", "add_generation_prompt", "tokenize", "return_dict")


class Data(OpenSections):
    """Prompts."""

    registry: ClassVar[Registry] = TASKS
    selects: ClassVar[str] = "task"

    task: EntryName | None = Field(
        None,
        description=f"what makes models and data where no model is named: {', '.join(TASKS.names())}, the default "
        "then, or your own as package.module:name or FILE.py:name; its settings are in data.NAME",
    )
    cache_dir: str | None = Field(None, description="where a task keeps what it made; null: ~/.cache/gkd")
    train_files: Files = Field(
        [],
        description="JSONL, JSON, CSV, Parquet, datasets directories, or names in the local Hugging Face cache such as "
        "openai/gsm8k:main:train; empty: data.task's (TRL: dataset_name; slime, OpenRLHF: prompt_data)",
    )
    val_files: Files = Field(
        [], description="held-out prompts, same formats (TRL: eval_dataset; slime: eval_prompt_data)"
    )
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
    prompt_template: str | None = Field(
        None,
        description="text with {COLUMN} in it that makes the prompt of a row, in place of prompt_key (OpenRLHF's "
        "input_template); {{...}} stays as {...}",
    )
    system_prompt: str | None = Field(
        None, description="system message of every prompt that has none; text is then asked as a user's message"
    )
    apply_chat_template: bool | None = Field(
        None,
        description="true: text is asked as a user's message (slime, OpenRLHF: apply_chat_template); null: as it is, "
        "with a warning where the model has a chat template; false: without",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {},
        description="what the chat template is given beside messages, such as {enable_thinking: false} (TRL: "
        "chat_template_kwargs; verl: apply_chat_template_kwargs)",
    )
    train_weights: list[Annotated[float, Field(gt=0)]] | None = Field(
        None,
        min_length=1,
        description="share of each of train_files in the training prompts, as weights (OpenRLHF's prompt_data_probs); "
        "null: all prompts equally often",
    )
    teacher_key: str | None = Field(None, description="column that names which of teacher.models a prompt is for")
    max_prompt_length: int = Field(
        1024,
        ge=1,
        description="longer prompts are counted and left out, tokens (verl: filter_overlong_prompts, truncation; "
        "slime: rollout_max_prompt_len)",
    )
    val_sets: dict[str, EvalSet] = Field(
        {}, description="further sets to validate on, by name, each with its own interval and sampling: val/NAME/*"
    )
    val_limit: int = Field(256, ge=1, description="validation prompts used at most (verl: val_max_samples)")
    val_top_k: int = Field(
        512,
        ge=1,
        description="teacher's K most likely tokens that val/reverse_kl compares, and one bucket for the rest: a lower "
        "bound, exact where K is the vocabulary",
    )

    @property
    def uses_chat_format(self) -> bool:
        """Whether text is asked as a user's message."""
        return bool(self.apply_chat_template) or self.system_prompt is not None

    @field_validator("prompt_template")
    @classmethod
    def _template_has_a_place(cls, template: str | None) -> str | None:
        if template is not None and not any(place["name"] or place["text"] for place in PLACE.finditer(template)):
            raise ValueError("names no column: one as {question} is needed")
        return template

    @field_validator("chat_template_kwargs")
    @classmethod
    def _kwargs_are_the_templates(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        for name in kwargs:
            if name in _NOT_THE_TEMPLATES or not name.isidentifier():
                raise ValueError(f"{name} is no variable that a chat template is given here")
        return kwargs

    @model_validator(mode="after")
    def _settings_of_prompts_go_together(self) -> Data:
        if self.system_prompt is not None and self.apply_chat_template is False:
            raise ValueError("system_prompt is part of a chat: apply_chat_template=false excludes it")
        if self.train_weights is not None and len(self.train_weights) != len(self.train_files):
            raise ValueError(f"train_weights={self.train_weights}: there are {len(self.train_files)} train_files")
        places = [place["name"] or place["text"] for place in PLACE.finditer(self.prompt_template or "")]
        if self.answer_key is not None and self.answer_key in places:
            slot = "{" + self.answer_key + "}"
            raise ValueError(f"prompt_template has {slot}, the reference answer; as text it is written {{{slot}}}")
        return self

    @model_validator(mode="after")
    def _sets_have_names_of_their_own(self) -> Data:
        for name in self.val_sets:
            if name in _TAKEN:
                raise ValueError(f"val_sets.{name} {_TAKEN[name]}: another name")
            if not re.fullmatch(r"[\w.+-]+", name):
                raise ValueError(f"val_sets.{name} is a part of metrics' names: letters, digits and . + - _ alone")
        return self

    @model_validator(mode="after")
    def _task_makes_models_and_data(self) -> Data:
        kind = None if self.task is None else TASKS.load(self.task)
        if kind is not None and not (
            isinstance(kind, type) and hasattr(kind, "make") and hasattr(kind, "model_configs")
        ):
            raise ValueError(f"task: {self.task} is no class with the methods make and model_configs")
        return self
