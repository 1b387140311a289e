"""Beginning again, in new processes, from the newest checkpoint of a run that lost workers which it cannot do without.

The driver's process replaces itself (``exec``), so nothing of the run that was lost, such as a call into Ray that does
not return, is left, and whoever waits for the process (a shell, Slurm, Ray's job) sees one run.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from gkd.cluster.workers.failure import WorkerDied
from gkd.config import Config, quote
from gkd.config.output_files import METRICS, SAMPLES
from gkd.driver.checkpoints.checkpoint import complete
from gkd.errors import ControlLost, RunFailed
from gkd.observability.run_files import RunFiles

COUNT = "GKD_RESTARTS"
"""Variable of a run's process: how often the run has begun again."""


def restarts() -> int:
    """Return how often the run of this process has begun again by itself."""
    return int(os.environ.get(COUNT, "0"))


def may_begin_again(config: Config, output: Path, first: int, failure: RunFailed | ControlLost, private: bool) -> bool:
    """Return whether the run in ``output`` may begin again after ``failure``.

    That is for worker processes that died, and for a ``private`` Ray whose control service did, up to
    ``trainer.restarts`` times; and never where no step was trained since the run went on from step ``first``: what
    ended it would end it again.
    """
    lost = isinstance(failure, WorkerDied) or (private and isinstance(failure, ControlLost))
    if not lost or restarts() >= config.trainer.restarts:
        return False
    return RunFiles(output).step > first


def begin_again(config: Config, arguments: Sequence[str], output: Path) -> NoReturn:
    """Replace this process by ``gkd.main`` with the same ``arguments``, which goes on in ``output``."""
    number = restarts() + 1
    os.environ[COUNT] = str(number)
    print(f"beginning again in new processes (restart {number} of trainer.restarts={config.trainer.restarts})")
    resume = [f"trainer.output_dir={quote(str(output))}", "trainer.resume=true"]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with contextlib.suppress(ChildProcessError):  # what ended and was never waited for would stay, as a zombie
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    os.execv(sys.executable, [sys.executable, "-m", "gkd.main", *arguments, *resume])


def start_over(output: Path) -> bool:
    """Forget what a run had logged that begins again without any checkpoint; returns whether that is so."""
    if not restarts() or complete(output / "checkpoints"):
        return False
    for name in (METRICS, SAMPLES):
        (output / name).unlink(missing_ok=True)
    return True
