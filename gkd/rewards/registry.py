"""Finding a reward by the name it has in the configuration."""

from __future__ import annotations

import importlib
from functools import partial

from gkd.config import BUILTIN_REWARDS, Reward
from gkd.errors import ConfigError
from gkd.rewards import completion


def resolve(name: str, settings: Reward) -> completion.Reward:
    """The reward ``name``: one of this package's with its options, or the user's ``package.module:name``.

    Raises ConfigError when there is none.
    """
    if name in BUILTIN_REWARDS:
        function = getattr(importlib.import_module(f"gkd.rewards.{name}"), name)
        options = getattr(settings, name, None)
        return function if options is None else partial(function, options=options)
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # the user's module may raise anything, and may end programs
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"reward.functions: {name} cannot be imported: {type(error).__name__}: {reason}") from None
    if not callable(found):
        raise ConfigError(f"reward.functions: {name} is no function but {type(found).__name__}")
    user: completion.Reward = found
    return user
