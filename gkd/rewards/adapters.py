"""Reward functions as gkd, verl and TRL have them, called alike.

A plain function is recognised by the names of its parameters:

- gkd: ``f(completion)``.
- verl: ``compute_score(data_source, solution_str, ground_truth, extra_info)``, a number or a mapping with ``score``.
- TRL: ``reward_func(prompts, completions, **columns)``, a list of numbers; it is given lists of one.

Further parameters with defaults are settings, in ``reward.NAME`` (:mod:`gkd.config.rewards`). Any of them may be async.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from gkd.config.rewards import REWARDS, Reward
from gkd.data.layouts import VERL_ANSWER
from gkd.data.row import Row
from gkd.rewards.completion import Completion, Mark

Scored = Any
"""A number, or an awaitable of one."""


def resolve(name: str, settings: Reward) -> Mark:
    """Return the reward ``name``: a plain function (:func:`adapted`), or an object of the class with its settings.

    Raises ConfigError where there is none.
    """
    mark = REWARDS.load(name)
    config = settings.settings_of(name)
    if isinstance(mark, type):
        reward: Mark = mark() if config is None else mark(config)
        return reward
    return adapted(mark, {} if config is None else {name: getattr(config, name) for name in type(config).model_fields})


def adapted(function: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[[Completion], Scored]:
    """Return ``function`` as one of a :class:`Completion`, with ``settings`` for its further parameters."""
    names = _parameters(function)
    if "completions" in names:
        return _of(function, settings, _trl_arguments, _only)
    if "solution_str" in names:
        return _of(function, settings, _verl_arguments, _score)
    if not settings:
        return function
    return lambda completion: function(completion, **settings)


def _of(
    function: Callable[..., Any],
    settings: Mapping[str, Any],
    arguments: Callable[[Completion], dict[str, Any]],
    result: Callable[[Any], float],
) -> Callable[[Completion], Scored]:
    names, takes_all = _parameters(function), _takes_all(function)

    def chosen(completion: Completion) -> dict[str, Any]:
        given = {**arguments(completion), **settings}
        return given if takes_all else {name: value for name, value in given.items() if name in names}

    if inspect.iscoroutinefunction(function):

        async def later(completion: Completion) -> float:
            return result(await function(**chosen(completion)))

        return later
    return lambda completion: result(function(**chosen(completion)))


def _verl_arguments(completion: Completion) -> dict[str, Any]:
    row = Row(dict(completion.columns), "")
    truth = row.find(VERL_ANSWER)
    return {
        "data_source": row.find("data_source"),
        "solution_str": completion.response,
        "ground_truth": completion.answer if truth is None else truth,
        "extra_info": row.find("extra_info"),
    }


def _trl_arguments(completion: Completion) -> dict[str, Any]:
    in_chat = completion.messages is not None
    prompt: Any = [dict(message) for message in completion.messages or ()] if in_chat else completion.prompt
    response: Any = [{"role": "assistant", "content": completion.response}] if in_chat else completion.response
    columns = {name: [value] for name, value in completion.columns.items() if name not in ("prompt", "completion")}
    return {**columns, "prompts": [prompt], "completions": [response]}


def _score(result: Any) -> float:
    """Return verl's result as a number. Raises ValueError for a mapping without a score."""
    if isinstance(result, Mapping):
        if "score" not in result:
            raise ValueError(f"the reward is a mapping without score: {', '.join(map(str, result))}")
        result = result["score"]
    return float(result)


def _only(result: Any) -> float:
    """Return the one number of TRL's result. Raises ValueError where it is none, or there are others."""
    values = list(result)
    if len(values) != 1:
        raise ValueError(f"{len(values)} rewards for one completion")
    if values[0] is None:
        raise ValueError("the reward is None")
    return float(values[0])


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin
        return {}


def _takes_all(function: Callable[..., Any]) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in _parameters(function).values())
