"""Beginning again, in new processes, from the newest checkpoint of a run that lost workers which it cannot do without.

The driver's process replaces itself (``exec``), so nothing of the run that was lost, such as a call into Ray that does
not return, is left, and whoever waits for the process (a shell, Slurm, Ray's job) sees one run.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from gkd.cluster.workers.failure import WorkerDied
from gkd.config import Config
from gkd.config.output_files import BEST, METRICS, SAMPLES
from gkd.config.overrides import literal_override
from gkd.driver.checkpoints.checkpoint import complete
from gkd.driver.checkpoints.resume import has_trained
from gkd.durable import hand_on
from gkd.errors import ConfigError, ControlLost, RunFailed, one_line
from gkd.observability.tracking import OnStep

COUNT = "GKD_RESTARTS"
"""Variable of a run's process: how often the run has begun again."""
FIRST_FAILURE = "GKD_FIRST_FAILURE"
"""Variable of a run's process that has begun again: what it first began again after since it last trained a step."""


def restarts() -> int:
    """Return how often the run of this process has begun again by itself."""
    return int(os.environ.get(COUNT, "0"))


def may_begin_again(config: Config, failure: RunFailed | ControlLost, private: bool) -> bool:
    """Return whether a run may begin again after ``failure``.

    That is for worker processes that died, and for a ``private`` Ray whose control service did, up to
    ``trainer.restarts`` times, whether or not a step was trained since the last time: what is lost while a run begins
    again is no sign that it cannot run.
    """
    lost = isinstance(failure, WorkerDied) or (private and isinstance(failure, ControlLost))
    return lost and restarts() < config.trainer.restarts


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
        failure = RunFailed(str(error)) if isinstance(error, ConfigError) else error
        failure.add_note(f"no step was trained since the first failure: {first}")
        raise failure from None


def forget_failure_on_step(on_step: OnStep | None) -> OnStep:
    """Return an ``on_step`` that forgets the first failure once a step is trained."""

    def forget(step: int, metrics: Mapping[str, float]) -> None:
        if step > 0:  # step 0 is the validation before the first one
            os.environ.pop(FIRST_FAILURE, None)
        if on_step is not None:
            on_step(step, metrics)

    return forget


def begin_again(
    config: Config, arguments: Sequence[str], output: Path, descriptor: int, address: str | None, failure: Exception
) -> NoReturn:
    """Replace this process, after ``failure``, by ``gkd.main`` with the same ``arguments``, to go on in ``output``.

    That stays held by ``descriptor``, so that no other run begins there meanwhile. ``address``: the cluster that it was
    on, which it joins again, also where nothing here states any more that it is there; None of a private Ray, whose
    GPUs nobody else counts.
    """
    number = restarts() + 1
    os.environ[COUNT] = str(number)
    os.environ.setdefault(FIRST_FAILURE, one_line(failure))
    print(f"beginning again in new processes (restart {number} of trainer.restarts={config.trainer.restarts})")
    resume = [literal_override("trainer.output_dir", output), "trainer.resume=true"]
    if address is not None:
        resume.append(literal_override("cluster.address", address))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with contextlib.suppress(ChildProcessError):  # what ended and was never waited for would stay, as a zombie
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    hand_on(descriptor)
    os.execv(sys.executable, [sys.executable, "-m", "gkd.main", *arguments, *resume])


def start_over(config: Config, output: Path) -> bool:
    """Forget what a run had logged that left no checkpoint and may begin again; returns whether that is so.

    It may where it does so by itself, and by ``trainer.resume=auto``, unless it has done its last step.
    """
    may = restarts() > 0 or config.trainer.resume == "auto"
    if not may or has_trained(output) or complete(output / "checkpoints"):
        return False
    for name in (METRICS, SAMPLES, BEST):
        (output / name).unlink(missing_ok=True)
    return True
