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
from gkd.config import Config
from gkd.config.loading import names_file
from gkd.config.output_files import BEST, CONFIG, METRICS, SAMPLES, SOURCES
from gkd.config.overrides import literal_override
from gkd.config.own_code import KEPT, find_kept
from gkd.driver.checkpoints.attempts import COUNT, FIRST_FAILURE, restarts
from gkd.driver.checkpoints.checkpoint import complete
from gkd.driver.checkpoints.resume import has_trained
from gkd.durable import hand_on
from gkd.errors import ControlLost, RunFailed, one_line


def may_begin_again(config: Config, failure: RunFailed | ControlLost, private: bool) -> bool:
    """Return whether a run may begin again after ``failure``.

    That is for worker processes that died, and for a ``private`` Ray whose control service did, up to
    ``trainer.restarts`` times, whether or not a step was trained since the last time: what is lost while a run begins
    again is no sign that it cannot run.
    """
    lost = isinstance(failure, WorkerDied) or (private and isinstance(failure, ControlLost))
    return lost and restarts() < config.trainer.restarts


def begin_again(
    config: Config, arguments: Sequence[str], output: Path, descriptor: int, address: str | None, failure: Exception
) -> NoReturn:
    """Replace this process, after ``failure``, by ``gkd.main`` with the same ``arguments``, to go on in ``output``.

    In place of a file among them, which may have been edited meanwhile, it is given what the run has written of itself,
    and in place of users' files of code what it has kept of them.
    That stays held by ``descriptor``, so that no other run begins there meanwhile. ``address``: the cluster that it was
    on, which it joins again where its settings name none, also where nothing here states any more that it is there;
    None of a private Ray, whose GPUs nobody else counts.
    """
    number = restarts() + 1
    os.environ[COUNT] = str(number)
    os.environ.setdefault(FIRST_FAILURE, one_line(failure))
    print(f"beginning again in new processes (restart {number} of trainer.restarts={config.trainer.restarts})")
    if any(map(names_file, arguments)) and (output / CONFIG).is_file():
        arguments = [str(output / CONFIG)]
    os.environ[KEPT] = str(find_kept(output / SOURCES))
    resume = [literal_override("trainer.output_dir", output), "trainer.resume=true"]
    if address is not None:  # config.yaml, which others may take, has no such address
        os.environ["RAY_ADDRESS"] = address
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a log on a disk that is full is no reason to end
            print(end="", file=stream, flush=True)
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
