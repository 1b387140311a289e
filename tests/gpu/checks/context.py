"""What a check is given, and how it says what it saw."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Skipped(Exception):
    """This machine lacks what the check needs; the text says what."""


@dataclass
class Context:
    """``n_gpus`` is 0 in a rehearsal. ``scratch`` is shared by all checks of one acceptance run."""

    n_gpus: int
    scratch: Path
    result: Path
    """Where figures and the outcome are written, whole at every moment."""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def rehearsal(self) -> bool:
        """Whether this runs on a CPU, with small models and few steps."""
        return self.n_gpus == 0

    def note(self, values: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Keep figures; what was kept survives whatever happens to the check."""
        for name, value in {**(values or {}), **more}.items():
            self.figures[name] = float(f"{value:.5g}") if isinstance(value, float) else value
        self.write(None)

    def write(self, status: str | None, reason: str = "") -> None:
        """Write the result file; ``status`` None while the check runs."""
        unfinished = self.result.with_suffix(".writing")
        unfinished.write_text(json.dumps({"status": status, "reason": reason, "figures": self.figures}, default=str))
        unfinished.replace(self.result)


@contextmanager
def use_gpu(rehearsal: bool) -> Iterator[None]:
    """Have ``cuda`` be the GPU; in a rehearsal a device that is not the host and computes with the host's numbers."""
    if not rehearsal:
        yield
        return
    from tests.gpu import other_device

    other_device.set_up()
    with other_device.entered():
        yield


def require(condition: bool, text: str) -> None:
    """Raise AssertionError with ``text`` unless ``condition`` holds; unlike ``assert`` under every ``-O``."""
    if not condition:
        raise AssertionError(text)
