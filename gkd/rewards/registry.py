"""Finding a reward by the name it has in the configuration."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

from gkd.config import BUILTIN_REWARDS, Reward
from gkd.config.rewards import reward_file
from gkd.errors import ConfigError
from gkd.rewards import completion


def resolve(name: str, settings: Reward) -> completion.Reward:
    """The reward ``name``: one of this package's with its options, or the user's own.

    That is ``package.module:name`` or ``FILE.py:name``, whose file may import what lies beside it.

    Raises ConfigError when there is none.
    """
    if name in BUILTIN_REWARDS:
        function = getattr(importlib.import_module(f"gkd.rewards.{name}"), name)
        options = getattr(settings, name, None)
        return function if options is None else partial(function, options=options)
    given, (module, _, attribute) = reward_file(name), name.rpartition(":")
    file = None if given is None else _on_this_machine(given[0])
    if file is not None and not file.is_file():
        raise ConfigError(f"reward.functions: {name}: there is no file {file}")
    try:
        found = getattr(importlib.import_module(module) if file is None else _module(file), attribute)
    except (Exception, SystemExit) as error:  # the user's module may raise anything, and may end programs
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"reward.functions: {name} cannot be imported: {type(error).__name__}: {reason}") from None
    if not callable(found):
        raise ConfigError(f"reward.functions: {name} is no function but {type(found).__name__}")
    user: completion.Reward = found
    return user


def _on_this_machine(file: Path) -> Path:
    """``file``, or this node's copy of it where it came with a job.

    Ray unpacks a job's files into a directory that is named after their content, on each node where that node keeps
    such things, and starts workers in it.
    """
    own = {folder.name: folder for folder in (Path.cwd(), *Path.cwd().parents) if folder.name.startswith("_ray_pkg_")}
    for folder in file.parents:
        if folder.name in own:
            return own[folder.name] / file.relative_to(folder)
    return file


def _module(file: Path) -> ModuleType:
    """The module in ``file``, under a name that no other has. Raises whatever it raises."""
    name = f"gkd_reward_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # for names that end in .py there are both
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
