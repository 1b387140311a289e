"""The directory that a run writes into: made, tried, and held against another run.

Imports nothing that may be missing.
"""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gkd.durable import hold, make_beside, remove_drafts, take_over
from gkd.errors import ConfigError

if TYPE_CHECKING:
    from gkd.config import Config

LOOKS, LOOK_S = 10, 0.05
"""How often, and after which time, a directory that is held is tried again: monitors hold it as they look."""


def make_output_dir(config: Config) -> Path:
    """Make the directory that the run writes into, and return it.

    Raises ConfigError when another run is there already or nothing can be written.
    """
    from gkd.config import user_path

    stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    if config.trainer.output_dir is None:
        if config.trainer.resume:
            raise ConfigError("trainer.resume needs trainer.output_dir: which run is to go on?")
        return _new_directory(Path(f"outputs/{config.recipe}/{stamp}").absolute())
    if not config.trainer.output_dir.strip():
        raise ConfigError("trainer.output_dir is empty: name a directory, or leave it out")
    path = user_path(config.trainer.output_dir).absolute()
    require_no_run(path, bool(config.trainer.resume))
    if config.trainer.resume is True and not path.is_dir():
        raise ConfigError(f"trainer.resume=true: there is no run in {path}; trainer.resume=auto would begin one")
    make_directory(path)
    return path


def make_directory(path: Path) -> None:
    """Make an output directory, where it is not there. Raises ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"trainer.output_dir={path} cannot be made: {error.strerror}") from None


def require_no_run(path: Path, resume: bool) -> None:
    """Raise ConfigError for the directory of a run, unless that is to go on, and for one that cannot be entered."""
    from gkd.config.output_files import METRICS, SUMMARY

    try:
        held = [name for name in (METRICS, SUMMARY, "model") if (path / name).exists()]
    except OSError as error:
        raise _explain_unreadable(path, error) from None
    if held and not resume:
        goes_on = ", or trainer.resume=true goes on with it" if (path / "checkpoints" / "latest").exists() else ""
        raise ConfigError(
            f"trainer.output_dir={path} already holds a run ({held[0]}); choose another or move it away{goes_on}"
        )


def require_writable(path: Path) -> None:
    """Raise ConfigError where no file can be made: now, and not when the first one is to be written."""
    try:
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"x")
            probe.flush()
    except OSError as error:
        raise ConfigError(f"trainer.output_dir={path} cannot be written: {error.strerror}") from None


def claim(path: Path) -> int:
    """Hold ``path`` for this run, until the descriptor is closed or the process ends, however that is.

    What runs that were killed there had begun to write is deleted. Raises ConfigError when another run holds it.
    """
    from gkd.config.output_files import REPLACED

    try:
        taken_over = take_over(path)
        descriptor = os.open(path, os.O_RDONLY) if taken_over is None else taken_over
    except OSError as error:
        raise _explain_unreadable(path, error) from None
    for _ in range(LOOKS):
        if hold(descriptor):
            for file in (*(path / name for name in REPLACED), path / "checkpoints" / "latest"):
                remove_drafts(file)
            return descriptor
        time.sleep(LOOK_S)
    os.close(descriptor)
    raise ConfigError(f"trainer.output_dir={path}: another run is writing there now")


def _explain_unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"trainer.output_dir={path} cannot be read: {error.strerror}")


def _new_directory(path: Path) -> Path:
    """Return ``path``, or ``path_2`` and so on where other runs began in the same second. Raises ConfigError."""
    try:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            return make_beside(path)
    except OSError as error:
        raise ConfigError(f"trainer.output_dir={path} cannot be made: {error.strerror}") from None
    return path
