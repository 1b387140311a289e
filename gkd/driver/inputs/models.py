"""Models of a run, found and checked: the student, and those that score or rate."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gkd.config import Config
from gkd.config.groups import model_setting, scorer_group
from gkd.data.model_info import ModelInfo
from gkd.data.task import TaskInputs
from gkd.data.tokenizer import check_causal_lm, check_same_tokenizer, check_student
from gkd.errors import ConfigError, one_line
from gkd.inference.vllm_models import (
    REFERENCE_REMEDY,
    SCORER_REMEDY,
    STUDENT_REMEDY,
    require_quantization,
    require_vllm_runs,
    scoring_engine,
)

log = logging.getLogger("gkd")


def find_models(config: Config, task_inputs: TaskInputs) -> tuple[str, dict[str, str]]:
    """Return directories of the student and, by name, of teachers and reference: the student's, where none is named.

    Raises ConfigError for a model that cannot be used, and one whose tokens are not the student's.
    """
    student = check_student(task_inputs.student, "model.path")
    named = {
        "teacher": task_inputs.teacher,
        **{f"teacher:{name}": path for name, path in config.teacher.models.items()},
    }
    if config.has_reference_group:
        named["reference"] = config.reference.model.path
    scorers = {}
    for name, path in named.items():
        if path is not None:
            scorers[name] = check_causal_lm(path, model_setting(name))
            check_same_tokenizer(student, scorers[name], model_setting(name))
    if config.has_reference_group:
        scorers.setdefault("reference", student)
    return student, scorers


def find_reward_model(config: Config) -> dict[str, str]:
    """Return the directory of the reward model by its name, where there is one. Raises ConfigError for an unfit one."""
    if not config.has_reward_model_group:
        return {}
    settings, kind = config.reward_model, config.reward_model.engine_class
    directory = kind.check_model(settings.model.path, "reward_model.model.path")
    if not isinstance(directory, str):  # of a class of the user's, anything
        raise ConfigError(
            f"reward_model.engine: {kind.__name__}.check_model() is to return the model's directory, a text, and "
            f"returns {one_line(repr(directory))}"
        )
    return {"reward_model": directory}


def read_models(student: str, scorers: Mapping[str, str], tokenizer: Any) -> dict[str, ModelInfo]:
    """Describe the student, which has this ``tokenizer``, and the models that score, by name.

    The student's ``n_tokens`` are those that all of them have a row for: a tokenizer may have more, as that of Gemma 3
    has for images, and what a scorer lacks must not be sampled.
    """
    models = {"student": ModelInfo.read(student, "model.path", tokenizer)}
    for name, path in scorers.items():
        models[name] = ModelInfo.read(path, model_setting(name))
    n_tokens = min(models["student"].n_tokens, *(model.vocabulary for model in models.values()))
    return {**models, "student": replace(models["student"], n_tokens=n_tokens)}


def require_usable(config: Config, student: str, scorers: dict[str, str]) -> None:
    """Raise ConfigError for a model that vLLM is to run and cannot, and a student that adapters cannot have."""
    if config.rollout.engine_class.needs_vllm:
        require_vllm_runs(student, "model.path", STUDENT_REMEDY)
    for name, path in scorers.items():
        group = scorer_group(name)
        if group not in config.groups():  # an external teacher's own machine runs it
            continue
        decided = _scoring_engine(config, group, _paths_of(scorers, group))
        engine = getattr(config, group).model_copy(update={"engine": decided})
        if not engine.engine_class.needs_vllm:
            continue
        require_quantization(engine.quantization, f"{group}.quantization")
        require_vllm_runs(path, model_setting(name), REFERENCE_REMEDY if group == "reference" else SCORER_REMEDY)
    if config.actor.lora.r is not None:
        from gkd.actor.lora import require_adaptable  # imports torch and peft

        require_adaptable(student, config.actor.lora)


def with_scoring_engines(config: Config, scorers: Mapping[str, str]) -> Config:
    """Return the configuration with the engines that score in place of ``auto``."""
    decided = {}
    for group in ("teacher", "reference"):
        paths = _paths_of(scorers, group)
        if paths and group in config.groups() and getattr(config, group).engine == "auto":
            decided[group] = _scoring_engine(config, group, paths)
    for group, engine in decided.items():
        log.info("the %s scores with %s (%s.engine=auto)", group, engine, group)
    return config.with_settings({f"{group}.engine": engine for group, engine in decided.items()})


def _paths_of(scorers: Mapping[str, str], group: str) -> list[str]:
    return [path for name, path in scorers.items() if scorer_group(name) == group]


def _scoring_engine(config: Config, group: str, paths: list[str]) -> str:
    """Return the engine of a group that scores; where several teachers differ, one that does without vLLM."""
    settings = getattr(config, group)
    engines = {scoring_engine(settings, path) for path in paths}
    return min(engines, key=lambda name: bool(settings.registry.load(name).needs_vllm))
