"""On-policy distillation and reinforcement learning of language models on Ray pools."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gkd.version import __version__ as __version__

if TYPE_CHECKING:
    from gkd.api import evaluate as evaluate
    from gkd.api import plan as plan
    from gkd.api import train as train

_API = ("train", "evaluate", "plan")


class _Package(ModuleType):
    """Keeps the names of :data:`_API` where the programs ``gkd.plan`` and ``gkd.evaluate`` are imported as well."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _API and isinstance(value, ModuleType)):  # which importing a module of the package does
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Return train, evaluate or plan of :mod:`gkd.api`, which is imported when one is first asked for."""
    if name in _API:
        from gkd import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
