"""Every setting of a run: its name, type, default and meaning.

Hydra composes the tree (:mod:`gkd.compose`); this package turns the result into typed, frozen objects once, and
everything below takes those. Nothing here imports torch, vLLM, Ray or Hydra, so checking a configuration is instant.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, ValidationError, model_validator

from gkd.config.base import Engine, Pool, Settings, parse_gpus
from gkd.config.groups import (
    MAX_AUTO_SIMULATED_GPUS,
    Actor,
    Builtin,
    Cluster,
    Data,
    Lora,
    Model,
    Reference,
    Rollout,
    Scorer,
    Teacher,
    TeacherModel,
    Trainer,
    Weights,
)
from gkd.config.learning import Algorithm, Loss, Overlong, Policy
from gkd.config.plan import Plan
from gkd.config.rewards import (
    BUILTIN_REWARDS,
    NEED_ANSWERS,
    CosineReward,
    FormatReward,
    LengthReward,
    ReasoningStepsReward,
    RepetitionReward,
    Reward,
)
from gkd.errors import ConfigError

__all__ = [
    "BUILTIN_REWARDS",
    "MAX_AUTO_SIMULATED_GPUS",
    "Actor",
    "Algorithm",
    "Builtin",
    "Cluster",
    "Config",
    "CosineReward",
    "Data",
    "Engine",
    "FormatReward",
    "LengthReward",
    "Lora",
    "Loss",
    "Model",
    "Overlong",
    "Plan",
    "Policy",
    "Pool",
    "ReasoningStepsReward",
    "Reference",
    "RepetitionReward",
    "Reward",
    "Rollout",
    "Scorer",
    "Settings",
    "Teacher",
    "TeacherModel",
    "Trainer",
    "Weights",
    "load",
    "nearest",
    "parse_gpus",
    "settings",
]


class Config(Settings):
    """One run."""

    recipe: str = Field("none", description="name of the recipe, part of the default output directory")
    model: Model = Model()
    teacher: Teacher = Teacher()
    reference: Reference = Reference()
    trainer: Trainer = Trainer()
    rollout: Rollout = Rollout()
    actor: Actor = Actor()
    data: Data = Data()
    builtin: Builtin = Builtin()
    algorithm: Algorithm = Algorithm()
    reward: Reward = Reward()
    weights: Weights = Weights()
    cluster: Cluster = Cluster()
    plan: Plan = Plan()

    @model_validator(mode="after")
    def _own_models_and_data_go_together(self) -> Config:
        given = {"model.path": not self.uses_builtin_task}
        models = self.teacher.model
        teacher = (models.path or models.size) is not None or self.teacher.server_ip is not None
        if self.algorithm.needs_teacher:
            given["teacher.model.path (or teacher.server_ip)"] = teacher
        elif teacher:
            raise ValueError(f"a teacher is given, but algorithm.name={self.algorithm.name} asks none")
        given |= {"data.train_files": bool(self.data.train_files), "data.val_files": bool(self.data.val_files)}
        if any(given.values()) and not all(given.values()):
            have = ", ".join(k for k, v in given.items() if v)
            lack = ", ".join(k for k, v in given.items() if not v)
            raise ValueError(f"given {have} but not {lack}: name all of them, or none for the built-in task")
        return self

    @model_validator(mode="after")
    def _external_teacher_has_no_pool(self) -> Config:
        if self.teacher.server_ip is not None and self.teacher.gpus is not None:
            raise ValueError("teacher.gpus and teacher.server_ip exclude each other: an external teacher has no pool")
        return self

    @model_validator(mode="after")
    def _ranges_are_disjoint(self) -> Config:
        owner: dict[int, str] = {}
        for name, pool in self.pools():
            for index in pool.gpus or []:
                if index in owner:
                    raise ValueError(f"{owner[index]}.gpus and {name}.gpus overlap: both name GPU {index}")
                owner[index] = name
        return self

    @model_validator(mode="after")
    def _policy_gradient_is_on_policy(self) -> Config:
        loss, rollout = self.algorithm.loss, self.rollout
        if loss.name == "sampled_reverse_kl" and not rollout.temperature == loss.temperature == rollout.top_p == 1.0:
            raise ValueError(
                "algorithm.loss.name=sampled_reverse_kl is a policy gradient on the plain model's samples: "
                "rollout.temperature, rollout.top_p and algorithm.loss.temperature must be 1"
            )
        return self

    @model_validator(mode="after")
    def _rewards_can_be_learned_from(self) -> Config:
        if not self.algorithm.policy_weight:
            return self
        why = f"algorithm.name={self.algorithm.name} learns from the differences between rewards"
        if self.rollout.n < 2:
            raise ValueError(f"rollout.n={self.rollout.n}: {why} of one prompt's samples; at least 2")
        if not self.reward.functions and not self.uses_builtin_task:
            raise ValueError(f"reward.functions is empty: {why}")
        for name in self.reward.functions:
            if ":" not in name and name not in BUILTIN_REWARDS:
                raise ValueError(
                    f"reward.functions: there is no reward {name}{nearest(name, list(BUILTIN_REWARDS))}; there are "
                    f"{', '.join(BUILTIN_REWARDS)}, or your own as package.module:name"
                )
            if name in NEED_ANSWERS and self.data.answer_key is None and not self.uses_builtin_task:
                raise ValueError(f"reward.functions: {name} needs reference answers, and data.answer_key is not set")
        return self

    @model_validator(mode="after")
    def _own_answers_can_be_learned_from(self) -> Config:
        algorithm = self.algorithm
        if algorithm.on_policy_share == 1:
            if algorithm.supervised_weight:
                raise ValueError(
                    "algorithm.supervised_weight counts for the data's own answers, of which "
                    "algorithm.on_policy_share=1 leaves none"
                )
            return self
        why = f"algorithm.on_policy_share={algorithm.on_policy_share:g} learns from the data's own answers"
        if self.data.answer_key is None and not self.uses_builtin_task:
            raise ValueError(f"{why}, and data.answer_key is not set")
        if algorithm.policy_weight or algorithm.loss.name == "sampled_reverse_kl":
            raise ValueError(f"{why}, which no policy gradient can: the student did not sample them")
        return self

    def pools(self) -> Iterator[tuple[str, Pool]]:
        """Sections that own GPUs, in the order these are handed out: trainer (the actor), rollout, ..."""
        yield "trainer", self.trainer
        yield "rollout", self.rollout
        if self.algorithm.needs_teacher and self.teacher.server_ip is None:
            yield "teacher", self.teacher
        if self.asks_reference:
            yield "reference", self.reference

    @property
    def asks_reference(self) -> bool:
        """Whether a group of its own says what the reference thinks; with LoRA it is the actor without its adapter."""
        return self.algorithm.kl.coef > 0 and self.actor.lora.r is None

    @property
    def uses_builtin_task(self) -> bool:
        """Whether the run makes its own models and data."""
        return self.model.path is None and self.model.size is None


def settings() -> dict[str, str]:
    """Every setting's dotted name and its meaning."""

    def walk(section: type[Settings], prefix: str) -> Iterator[tuple[str, str]]:
        for name, field in section.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, Settings):
                yield from walk(kind, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", field.description or ""

    return dict(walk(Config, ""))


def nearest(key: str, known: Mapping[str, Any] | list[str]) -> str:
    """`` (did you mean X?)`` for a misspelt name, or an empty string when nothing is near."""
    close = difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)
    if not close:  # the right leaf under the wrong section: compare last parts
        leaf = key.rsplit(".", 1)[-1]
        close = [k for k in known if k.rsplit(".", 1)[-1] == leaf][:1]
    return f" (did you mean {close[0]}?)" if close else ""


def load(tree: Mapping[str, Any]) -> Config:
    """Turn a composed tree into a checked :class:`Config`.

    Raises ConfigError, in one line, for the first thing that is wrong.
    """
    try:
        return Config.model_validate(dict(tree))
    except ValidationError as error:
        first = error.errors()[0]
        # Union branches add their type's name to the location; only real keys are shown.
        key = ".".join(str(part) for part in first["loc"] if not re.search(r"[\[\]()]|^(int|str|literal)", str(part)))
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"unknown setting {key}{nearest(key, settings())}") from None
        message = str(first["msg"]).removeprefix("Value error, ")
        message = message[0].lower() + message[1:]
        shown = "" if isinstance(first["input"], Mapping) else f"={first['input']}"
        raise ConfigError(f"{key}{shown}: {message}" if key else message) from None
