"""On-policy distillation and reinforcement learning of language models on Ray pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gkd.api import evaluate as evaluate
    from gkd.api import plan as plan
    from gkd.api import train as train

__version__ = "0.2.0"
"""The version of this code, which packaging reads from here and a run writes into its files."""


def __getattr__(name: str) -> Any:
    """Return train, evaluate or plan of :mod:`gkd.api`, which is imported when one is first asked for."""
    if name in ("train", "evaluate", "plan"):
        from gkd import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
