"""Every setting of a run: its name, type, default and meaning.

Hydra composes the tree (:mod:`gkd.compose`); this package turns the result into typed, frozen objects once, and
everything below takes those. Nothing here imports torch, vLLM, Ray or Hydra, so checking a configuration is instant.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from itertools import combinations
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
    RewardModel,
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
    REWARD_MODEL,
    CosineReward,
    FormatReward,
    JudgeReward,
    LengthReward,
    ReasoningStepsReward,
    RepetitionReward,
    Reward,
)
from gkd.config.watch import Watch
from gkd.errors import ConfigError

__all__ = [
    "BUILTIN_REWARDS",
    "GROUPS",
    "MAX_AUTO_SIMULATED_GPUS",
    "NEED_ANSWERS",
    "REWARD_MODEL",
    "Actor",
    "Algorithm",
    "Builtin",
    "Cluster",
    "Config",
    "CosineReward",
    "Data",
    "Engine",
    "FormatReward",
    "JudgeReward",
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
    "RewardModel",
    "Rollout",
    "Scorer",
    "Settings",
    "Teacher",
    "TeacherModel",
    "Trainer",
    "Watch",
    "Weights",
    "load",
    "nearest",
    "parse_gpus",
    "settings",
]


GROUPS = {"trainer": "actor"}
"""Sections whose group of workers has another name."""

_GROUP_OF = {name: GROUPS.get(name, name) for name in ("trainer", "rollout", "teacher", "reference", "reward_model")}


class Config(Settings):
    """One run."""

    recipe: str = Field("none", description="name of the recipe, part of the default output directory")
    model: Model = Model()
    teacher: Teacher = Teacher()
    reference: Reference = Reference()
    reward_model: RewardModel = RewardModel()
    trainer: Trainer = Trainer()
    rollout: Rollout = Rollout()
    actor: Actor = Actor()
    data: Data = Data()
    builtin: Builtin = Builtin()
    algorithm: Algorithm = Algorithm()
    reward: Reward = Reward()
    weights: Weights = Weights()
    cluster: Cluster = Cluster()
    watch: Watch = Watch()
    plan: Plan = Plan()

    @model_validator(mode="after")
    def _own_models_and_data_go_together(self) -> Config:
        given = {"model.path": not self.uses_builtin_task}
        model = self.teacher.model
        teacher = any((model.path, model.size, self.teacher.server_ip, self.teacher.models))
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
    def _a_reference_is_asked(self) -> Config:
        if self.reference.model.path is None or self.asks_reference:
            return self
        why = "algorithm.kl.coef=0 asks none" if self.algorithm.kl.coef == 0 else "with actor.lora.r it is the student"
        raise ValueError(f"reference.model.path is set, but {why}")

    @model_validator(mode="after")
    def _several_teachers_are_told_apart(self) -> Config:
        teacher = self.teacher
        if bool(teacher.models) != bool(self.data.teacher_key):
            raise ValueError("teacher.models and data.teacher_key go together: which teacher is a prompt for?")
        if teacher.models and (teacher.model.path is not None or teacher.server_ip is not None):
            raise ValueError("teacher.models excludes teacher.model.path and teacher.server_ip")
        if len(teacher.models) > teacher.n_engines:
            raise ValueError(
                f"teacher.models names {len(teacher.models)} models, and the teacher's pool has {teacher.n_engines} "
                "engines: at least one each (teacher.n_gpus_per_node)"
            )
        return self

    @model_validator(mode="after")
    def _external_teacher_has_no_pool(self) -> Config:
        if self.teacher.server_ip is not None and self.teacher.ranges() is not None:
            raise ValueError("teacher.gpus and teacher.server_ip exclude each other: an external teacher has no pool")
        return self

    @model_validator(mode="after")
    def _ranges_are_disjoint(self) -> Config:
        owner: dict[int, str] = {}
        guests = self.hosts()
        for name, pool in self.pools():
            for index in pool.gpus or [] if GROUPS.get(name, name) not in guests else []:
                if index in owner:
                    raise ValueError(f"{owner[index]}.gpus and {name}.gpus overlap: both name GPU {index}")
                owner[index] = name
        return self

    @model_validator(mode="after")
    def _guests_fit_on_their_hosts(self) -> Config:
        pools = {GROUPS.get(section, section): (section, pool) for section, pool in self.pools()}
        for guest, host in self.hosts().items():
            (section, own), (other, its) = pools[guest], pools[host]
            what = f"{section}.share_with={own.share_with}"
            if own.n_gpus_per_node > its.n_gpus_per_node or own.nnodes > its.nnodes:
                raise ValueError(
                    f"{what}: {section} is to have {own.n_gpus_per_node} GPUs on {own.nnodes} nodes, and {other} has "
                    f"{its.n_gpus_per_node} on {its.nnodes}"
                )
            if own.gpus_by_node is not None:
                raise ValueError(
                    f"{what}: {section} is on the first GPUs of {other}, so leave {section}.gpus_by_node out"
                )
            if own.gpus is not None and not set(own.gpus) <= set(its.gpus or ()):
                raise ValueError(f"{what}: {section}.gpus={own.gpus} is not within {other}.gpus={its.gpus}")
        return self

    @model_validator(mode="after")
    def _turns_can_be_taken(self) -> Config:
        if self.cluster.take_turns is not True:
            return self
        if not self.on_the_actors_gpus():
            raise ValueError("cluster.take_turns=true: no group shares GPUs with the actor (share_with)")
        if self.actor.lora.quantize is not None:
            raise ValueError(
                f"cluster.take_turns=true: actor.lora.quantize={self.actor.lora.quantize} stays on its GPU"
            )
        return self

    @model_validator(mode="after")
    def _hf_takes_weights_from_the_object_store(self) -> Config:
        transfer = self.weights.transfer
        if self.rollout.engine == "hf" and transfer not in ("auto", "object_store"):
            raise ValueError(
                f"weights.transfer={transfer}: rollout.engine=hf takes weights from the object store alone; "
                "weights.transfer=object_store or auto would work"
            )
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
            if self.reward.functions:
                raise ValueError(
                    f"reward.functions={self.reward.functions}: nothing is learned from rewards with "
                    f"algorithm.name={self.algorithm.name} and algorithm.reward_weight=0"
                )
            return self
        why = f"algorithm.name={self.algorithm.name} learns from the differences between rewards"
        if self.rollout.n < 2:
            raise ValueError(f"rollout.n={self.rollout.n}: {why} of one prompt's samples; at least 2")
        if not self.reward.functions and not self.uses_builtin_task:
            raise ValueError(f"reward.functions is empty: {why}")
        for name in self.reward.functions:
            known = [*BUILTIN_REWARDS, REWARD_MODEL]
            if ":" not in name and name not in known:
                raise ValueError(
                    f"reward.functions: there is no reward {name}{nearest(name, known)}; there are "
                    f"{', '.join(known)}, or your own as package.module:name"
                )
            if name in NEED_ANSWERS and self.data.answer_key is None and not self.uses_builtin_task:
                raise ValueError(f"reward.functions: {name} needs reference answers, and data.answer_key is not set")
        if self.asks_reward_model and self.reward_model.model.path is None:
            raise ValueError("reward.functions names reward_model, and reward_model.model.path is not set")
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
        if self.asks_reward_model:
            yield "reward_model", self.reward_model

    def hosts(self) -> dict[str, str]:
        """Of every group that works on GPUs of another: which group these belong to.

        A group that the run does not have passes on those that would share with it to the one it would share with.
        Raises ValueError where groups share with each other in a circle.
        """
        sections = {group: section for section, group in _GROUP_OF.items()}
        present = {_GROUP_OF[section] for section, _ in self.pools()}
        found: dict[str, str] = {}
        for group in present:
            host, seen = group, [group]
            while (following := getattr(self, sections[seen[-1]]).share_with) is not None:
                if following in seen:
                    raise ValueError(f"share_with goes in a circle: {' -> '.join([*seen, following])}")
                seen.append(following)
                host = following if following in present else host
            if host != group:
                found[group] = host
        return found

    def may_share(self) -> set[frozenset[str]]:
        """Pairs of groups that may be on the same GPU."""
        hosts = self.hosts()
        crowds = [{host, *(guest for guest, its in hosts.items() if its == host)} for host in set(hosts.values())]
        return {frozenset(pair) for crowd in crowds for pair in combinations(sorted(crowd), 2)}

    def on_the_actors_gpus(self) -> list[str]:
        """Groups besides the actor that work on its GPUs, in the order of :meth:`pools`."""
        shared = self.may_share()
        groups = (GROUPS.get(section, section) for section, _ in self.pools())
        return [group for group in groups if frozenset(("actor", group)) in shared]

    @property
    def asks_reference(self) -> bool:
        """Whether a group of its own says what the reference thinks; with LoRA it is the actor without its adapter."""
        return self.algorithm.kl.coef > 0 and self.actor.lora.r is None

    @property
    def asks_reward_model(self) -> bool:
        """Whether one of the rewards is a model's, in a group of its own."""
        return self.algorithm.policy_weight > 0 and REWARD_MODEL in self.reward.functions

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
    longer = [name for name in known if name.startswith(key)][:1]
    close = longer or difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)
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
