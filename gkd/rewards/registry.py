"""Finding a reward by the name it has in the configuration."""

from __future__ import annotations

from functools import partial

from gkd.config import BUILTIN_REWARDS, Reward
from gkd.errors import ConfigError
from gkd.registry import Registry
from gkd.rewards import completion

REWARDS = Registry("reward.functions", {name: f"gkd.rewards.{name}:{name}" for name in BUILTIN_REWARDS})


def resolve(name: str, settings: Reward) -> completion.Reward:
    """The reward ``name``: one of this package's with its options, or the user's own.

    That is ``package.module:name`` or ``FILE.py:name``, whose file may import what lies beside it.

    Raises ConfigError when there is none.
    """
    found = REWARDS.load(name)
    if not callable(found):
        raise ConfigError(f"reward.functions: {name} is no function but {type(found).__name__}")
    options = getattr(settings, name, None) if name in BUILTIN_REWARDS else None
    reward: completion.Reward = found if options is None else partial(found, options=options)
    return reward
