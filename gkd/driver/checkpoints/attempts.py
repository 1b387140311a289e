"""What a run's process knows of those before it, which :mod:`gkd.driver.checkpoints.restart` replaced."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from gkd.errors import ConfigError, ControlLost, RunFailed

if TYPE_CHECKING:
    from gkd.observability.tracking import OnStep

COUNT = "GKD_RESTARTS"
"""Variable of a run's process: how often the run has begun again."""
FIRST_FAILURE = "GKD_FIRST_FAILURE"
"""Variable of a run's process that has begun again: what it first began again after since it last trained a step."""


def restarts() -> int:
    """Return how often the run of this process has begun again by itself."""
    return int(os.environ.get(COUNT, "0"))


@contextlib.contextmanager
def name_first_failure() -> Iterator[None]:
    """Have an error name what the run first began again after, since it last trained a step, if anything.

    Where a run could begin, what keeps it from going on is no mistake of its settings: a ConfigError becomes RunFailed.
    """
    try:
        yield
    except (ConfigError, RunFailed, ControlLost) as error:
        first = os.environ.get(FIRST_FAILURE)
        if first is None:
            raise
        note = f"no step was trained since the first failure: {first}"
        if isinstance(error, ConfigError):
            failure = RunFailed(str(error))
            failure.add_note(note)
            raise failure from None
        error.add_note(note)
        raise


def forget_failure_on_step(on_step: OnStep | None) -> OnStep:
    """Return an ``on_step`` that forgets the first failure once a step is trained."""

    def forget(step: int, metrics: Mapping[str, float]) -> None:
        if step > 0:  # step 0 is the validation before the first one
            os.environ.pop(FIRST_FAILURE, None)
        if on_step is not None:
            on_step(step, metrics)

    return forget
