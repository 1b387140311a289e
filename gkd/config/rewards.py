"""Rewards: which, and how much each counts. What each takes is stated by its class (:mod:`gkd.rewards`)."""

from __future__ import annotations

import inspect
import types
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import Field, PrivateAttr, TypeAdapter, ValidationError, create_model, model_validator

from gkd.config.base import Settings, WaitSeconds
from gkd.config.open import OpenSections
from gkd.config.registry import EntryNames, Registry, make_absolute, settings_class, shorten_name, why_not_callable

OWN_PARAMETERS = (
    "data_source", "solution_str", "ground_truth", "extra_info", "prompts", "completions", "completion_ids",
    "trainer_state", "log_extra", "log_metric", "data_sources", "solution_strs", "ground_truths", "extra_infos",
)  # fmt: skip
"""What a plain function of verl's or TRL's kind is given; :mod:`gkd.rewards.adapters` states when."""

TRL_PARAMETERS = frozenset(("prompts", "completions", "completion_ids"))
"""One of these a function of TRL's kind has."""

VERL_PARAMETERS = frozenset(("solution_str", "solution_strs"))
"""One of these a function of verl's kind has."""

GROUP_PARAMETERS = frozenset(("group", *TRL_PARAMETERS, "solution_strs"))
"""By one of these a reward takes all samples of a prompt together: gkd's, TRL's and verl's names."""


class _Rewards(Registry):
    """Rewards, of which plain functions have their parameters with defaults as settings, as classes have theirs."""

    def load(self, name: str) -> Any:
        """Return what ``name`` stands for; a function with such parameters has a ``Config``."""
        reward = super().load(name)
        if inspect.isfunction(reward) and not hasattr(reward, "Config"):
            annotations = _plain_annotations(reward)
            with_defaults = {
                parameter.name: (_type_of(annotations.get(parameter.name, Any), parameter.default), parameter.default)
                for parameter in list(inspect.signature(reward).parameters.values())[1:]
                if isinstance(parameter.default, bool | int | float | str | list | dict | None)
                and parameter.name not in OWN_PARAMETERS
            }
            if with_defaults:
                reward.Config = create_model("Config", __base__=Settings, **with_defaults)  # type: ignore[attr-defined, call-overload]
        return reward


def _plain_annotations(function: Any) -> dict[str, Any]:
    """Return the annotations of parameters that are of what YAML has: texts, numbers, lists and mappings of these."""
    try:
        hints = get_type_hints(function)
    except Exception:  # a name that is imported for a type checker alone: nothing is known of it here
        return {}
    return {name: hint for name, hint in hints.items() if _is_plain(hint)}


def _is_plain(annotation: Any) -> bool:
    if get_origin(annotation) in (Union, types.UnionType, list, dict):
        return all(map(_is_plain, get_args(annotation)))
    return annotation in (Any, bool, int, float, str, list, dict, type(None)) or get_origin(annotation) is Literal


def _type_of(annotation: Any, default: Any) -> Any:
    """Return the type of a parameter's values; its default is one, whatever the annotation states."""
    try:
        TypeAdapter(annotation, config=Settings.model_config).validate_python(default)
    except ValidationError:
        return annotation | None if default is None else Any
    return annotation


REWARDS = _Rewards(
    "reward.functions",
    {
        "accuracy": "gkd.rewards.accuracy:Accuracy",
        "code": "gkd.rewards.code:Code",
        "cosine": "gkd.rewards.cosine:Cosine",
        "format": "gkd.rewards.format:Format",
        "judge": "gkd.rewards.judge:Judge",
        "length": "gkd.rewards.length:Length",
        "reasoning_steps": "gkd.rewards.reasoning_steps:ReasoningSteps",
        "repetition_penalty": "gkd.rewards.repetition_penalty:RepetitionPenalty",
        "reward_model": "gkd.rewards.reward_model:ModelReward",
    },
)


class Reward(OpenSections):
    """The reward of a response: the weighted sum of reward functions."""

    registry: ClassVar[Registry] = REWARDS
    selects: ClassVar[str] = "functions"

    functions: EntryNames = Field(
        [],
        description=f"any of {', '.join(REWARDS.names())}, or your own as package.module:name or FILE.py:name (TRL's "
        "reward_funcs, verl's custom_reward_function); the settings of each are in reward.NAME",
    )
    set_functions: list[str] = Field(
        [],
        description="filled in: rewards of evaluate.sets and data.val_sets, whose settings are in reward.NAME as well",
    )
    weights: list[float] | None = Field(
        None, description="how much each function counts (TRL's reward_weights); null: 1 each"
    )
    timeout_s: WaitSeconds = Field(
        10.0, description="time one function has for one sample; for n together n times that"
    )
    concurrency: int = Field(32, ge=1, description="samples that a process puts to an async function at the same time")
    workers: int = Field(2, ge=1, description="processes beside each rollout engine that compute rewards")
    max_failed_share: float = Field(0.2, ge=0, le=1, description="share of a step's samples beyond which the run ends")
    # What the classes state, kept so that a worker imports no user's code beside its engine.
    _functions_needing_answers: list[str] = PrivateAttr(default_factory=list)
    _group_of: dict[str, str | None] = PrivateAttr(default_factory=dict)
    _asynchronous: set[str] = PrivateAttr(default_factory=set)
    _of_groups: list[str] = PrivateAttr(default_factory=list)
    _functions_needing_columns: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _functions_and_weights_go_together(self) -> Reward:
        if len(set(self.functions)) != len(self.functions):
            raise ValueError("functions names one twice")
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ValueError(f"weights={self.weights}: there are {len(self.functions)} functions")
        for name in self.functions:
            reward = REWARDS.load(name)
            if not callable(reward) or (isinstance(reward, type) and not _makes_callables(reward)):
                what = "is a class without __call__" if isinstance(reward, type) else f"is {type(reward).__name__}"
                raise ValueError(f"functions: {name} is no function: it {what}")
            self._group_of[name] = getattr(reward, "group", None)
            if getattr(reward, "needs_answer", False):
                self._functions_needing_answers.append(name)
            if getattr(reward, "needs_columns", name not in REWARDS.names()):
                self._functions_needing_columns.append(name)
            call = getattr(reward, "__call__", reward) if isinstance(reward, type) else reward  # noqa: B004
            if why := _why_not_called(reward, call):
                raise ValueError(f"functions: {name}: {why}: docs/rewards.md has what each kind is given")
            if inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__):
                self._asynchronous.add(name)
            if not GROUP_PARAMETERS.isdisjoint(required_parameters(call)):  # with a default it is a setting
                self._of_groups.append(name)
        return self

    @model_validator(mode="after")
    def _functions_have_their_time(self) -> Reward:
        for name in self.selected_names():
            setting = getattr(REWARDS.load(name), "ends_within", "")
            if setting and (limit := getattr(self.settings_of(name), setting)) >= self.timeout_s:
                raise ValueError(
                    f"{shorten_name(name)}.{setting}={limit:g} has to be below reward.timeout_s={self.timeout_s:g}"
                )
        return self

    def selected_names(self) -> list[str]:
        """Return every function that has its settings here."""
        return list(dict.fromkeys([*self.functions, *self.set_functions]))

    def with_functions(self, functions: list[str]) -> dict[str, Any]:
        """Return the section with other functions, and the settings of these alone."""
        names = {*type(self).model_fields, *REWARDS.names(), *map(shorten_name, functions)}
        section = {name: value for name, value in self.model_dump().items() if name in names}
        return {**section, "functions": functions, "weights": None, "set_functions": []}

    def weight_of(self) -> dict[str, float]:
        """Return weight of every function."""
        return dict(zip(self.functions, self.weights or [1.0] * len(self.functions), strict=True))

    def labels(self) -> dict[str, str]:
        """Return names for metrics: the last part of each function's name.

        Where another has the same it is that with the name of its file or module, or all of it (MLflow takes no //).
        """
        forms = [(shorten_name(name), name.rpartition("/")[2], name.lstrip("/")) for name in self.functions]
        uses = Counter(form for names in forms for form in set(names)) + Counter(["mean"])  # reward/mean is that of all
        return {
            name: next((form for form in names if uses[form] == 1), names[-1])
            for name, names in zip(self.functions, forms, strict=True)
        }

    def functions_needing_answers(self) -> list[str]:
        """Return functions that compare with a reference answer: their ``needs_answer`` is true."""
        return list(self._functions_needing_answers)

    def functions_needing_columns(self) -> list[str]:
        """Return functions that look at the columns of a row: those that state it, users' own that state nothing."""
        return list(self._functions_needing_columns)

    def own_functions(self) -> list[str]:
        """Return functions that are no built-in ones, and so may look at all that there is of a completion."""
        return [name for name in self.functions if name not in REWARDS.names()]

    def is_async(self, name: str) -> bool:
        """Return whether a function is called for several samples at the same time."""
        return name in self._asynchronous

    def group_functions(self) -> list[str]:
        """Return functions that are given all samples of a prompt together (:data:`GROUP_PARAMETERS`)."""
        return list(self._of_groups)

    def functions_scored_by(self, group: str | None) -> list[str]:
        """Return the functions that the group of workers ``group`` gives; None: those computed beside the engines."""
        return [name for name in self.functions if self._group_of[name] == group]


def find_set_functions(tree: Mapping[str, Any]) -> list[str]:
    """Return the rewards that sets of a composed tree name. Raises ConfigError for one that cannot be imported."""
    names: list[str] = []
    for section, key in (("evaluate", "sets"), ("data", "val_sets")):
        for name, settings in _section(_section(tree, section), key).items():
            rewards = _section({name: settings}, name).get("rewards")
            for reward in [rewards] if isinstance(rewards, str) else rewards if isinstance(rewards, list) else []:
                replace(REWARDS, setting=f"{section}.{key}.{name}.rewards").load(str(reward))
                names.append(make_absolute(str(reward)))
    return list(dict.fromkeys(names))


def _section(tree: Mapping[str, Any], name: Any) -> Mapping[str, Any]:
    """Return a part of a tree; nothing where it is no section, which is refused when its settings are checked."""
    part = tree.get(name)
    return part if isinstance(part, Mapping) else {}


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a callable by name; none of one without a signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin
        return {}


def required_parameters(function: Any, bound: bool = True) -> list[str]:
    """Return the parameters of a callable that have no defaults; not ``bound``: without the first one, ``self``."""
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = list(parameters_of(function).values())[0 if bound else 1 :]
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]


def _why_not_called(reward: Any, call: Any) -> str | None:
    """Return why a reward cannot be called with what rewards are given, or its class not be made; None where it can."""
    is_class = isinstance(reward, type)
    if is_class and (why := why_not_callable(reward, 1 if settings_class(reward) else 0)):
        argument = "its Config" if settings_class(reward) else "nothing, as it has no Config"
        return f"its class is given {argument}: {why}"
    required = required_parameters(call, bound=not is_class)
    if not TRL_PARAMETERS.isdisjoint(required):  # the others are columns, which only the data knows: required_columns
        return None
    is_verls = not VERL_PARAMETERS.isdisjoint(parameters_of(call))
    if missing := [name for name in required if name not in OWN_PARAMETERS] if is_verls else required[1:]:
        return f"its parameter {missing[0]} has no default, and no reward is given such a one"
    why = None if is_verls else why_not_callable(call, 2 if is_class else 1)
    return f"it is called with a completion: {why}" if why else None


def required_columns(reward: Any) -> list[str]:
    """Return the parameters of a reward of TRL's kind that nothing but a column of the data gives it."""
    is_class = isinstance(reward, type)
    required = required_parameters(reward.__call__ if is_class else reward, bound=not is_class)
    if TRL_PARAMETERS.isdisjoint(required):
        return []
    return [name for name in required if name not in OWN_PARAMETERS]


def _makes_callables(kind: type) -> bool:
    return any("__call__" in vars(base) for base in kind.__mro__)
