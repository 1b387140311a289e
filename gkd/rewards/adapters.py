"""Reward functions as gkd, verl and TRL have them, called alike.

A reward is recognised by the names of its parameters. Of one sample:

- gkd: ``f(completion)``.
- verl: ``compute_score(data_source, solution_str, ground_truth, extra_info)``, a number or a mapping with ``score``.

Of all samples of a prompt together, giving a list of as many:

- gkd: ``f(group)``, a list of completions.
- verl, batched: ``compute_score(data_sources, solution_strs, ground_truths, extra_infos)``.
- TRL: ``reward_func(prompts, completions, completion_ids, trainer_state, **columns)``, any of these.

Further parameters with defaults are settings, in ``reward.NAME`` (:mod:`gkd.config.rewards`). Any of them may be async.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from gkd.config.rewards import REWARDS, TRL_PARAMETERS, Reward, parameters_of, required_parameters
from gkd.data.layouts import VERL_ANSWER
from gkd.data.row import Row
from gkd.rewards.completion import DOES_NOT_APPLY, Completion, RewardCallable

Arguments: TypeAlias = Callable[[Any], dict[str, Any]]
"""Of a completion or a group of them, what a function of another system is given for it."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The part of ``transformers.TrainerState`` that TRL's rewards read: optimizer steps done, and of the whole run."""

    global_step: int
    max_steps: int


def resolve(name: str, settings: Reward) -> RewardCallable:
    """Return the reward ``name``: a plain function, or an object of the class with its settings; :func:`adapt`.

    Raises ConfigError where there is none.
    """
    reward = REWARDS.load(name)
    if isinstance(reward, type):
        return adapt(settings.build_named(name), {})
    return adapt(reward, dict(settings.settings_of(name) or {}))


def adapt(reward: Callable[..., Any], settings: Mapping[str, Any]) -> RewardCallable:
    """Return ``reward`` as one of a :class:`Completion`, or of a list of them where it rates groups.

    ``settings`` are its further parameters.
    """
    names = parameters_of(reward)
    if not TRL_PARAMETERS.isdisjoint(required_parameters(reward)):
        return _call_with_arguments(reward, settings, _trl_arguments, _trl_rewards)
    if "solution_strs" in names:
        return _call_with_arguments(
            reward, settings, _verl_arguments_of_group, lambda results: [_score(result) for result in results]
        )
    if "solution_str" in names:
        return _call_with_arguments(reward, settings, _verl_arguments, _score)
    if not settings:
        return reward
    return lambda rated: reward(rated, **settings)


def _call_with_arguments(
    reward: Callable[..., Any], settings: Mapping[str, Any], arguments: Arguments, result: Callable[[Any], Any]
) -> RewardCallable:
    names, takes_all = parameters_of(reward), _takes_all(reward)

    def reward_of(rated: Any) -> Any:
        values = {**arguments(rated), **settings}
        value = reward(**(values if takes_all else {name: value for name, value in values.items() if name in names}))
        return _await(value, result) if inspect.isawaitable(value) else result(value)

    return reward_of


async def _await(value: Awaitable[Any], result: Callable[[Any], Any]) -> Any:
    return result(await value)


def _verl_arguments(completion: Completion) -> dict[str, Any]:
    row = Row(dict(completion.columns), "")
    truth = row.find(VERL_ANSWER)
    return {
        "data_source": row.find("data_source"),
        "solution_str": completion.response,
        "ground_truth": completion.answer if truth is None else truth,
        "extra_info": row.find("extra_info") or {},  # as verl has it of a row without
    }


def _verl_arguments_of_group(group: Sequence[Completion]) -> dict[str, Any]:
    of_each = [_verl_arguments(completion) for completion in group]
    return {f"{name}s": [arguments[name] for arguments in of_each] for name in of_each[0]}


def _trl_arguments(group: Sequence[Completion]) -> dict[str, Any]:
    columns = {
        name: [completion.columns[name] for completion in group]
        for name in group[0].columns
        if name not in ("prompt", "completion", "completion_ids")
    }
    prompts = [c.prompt if c.messages is None else [dict(message) for message in c.messages] for c in group]
    responses = [c.response if c.messages is None else [{"role": "assistant", "content": c.response}] for c in group]
    standard = {"prompts": prompts, "completions": responses, "log_extra": _discard, "log_metric": _discard}
    if all(c.token_ids is not None for c in group):
        standard["completion_ids"] = [list(c.token_ids or ()) for c in group]
    state = TrainerState(min(c.step for c in group), group[0].total_steps)
    return {**columns, **standard, "trainer_state": state}


def _trl_rewards(results: Any) -> list[Any]:
    """Return TRL's results, of which None stands for a function that does not apply to a sample."""
    return [DOES_NOT_APPLY if result is None else result for result in results]


def _discard(name: str, value: Any) -> None:
    """Take what TRL would log of a reward: rewards are computed in processes that log nothing."""


def _score(result: Any) -> float:
    """Return verl's result as a number. Raises ValueError for a mapping without a score."""
    if isinstance(result, Mapping):
        if "score" not in result:
            raise ValueError(f"the reward is a mapping without score: {', '.join(map(str, result))}")
        result = result["score"]
    return float(result)


def _takes_all(reward: Callable[..., Any]) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters_of(reward).values())
