"""What is made once and kept: entries of a cache that are whole or not there.

An entry is a directory named after everything that determines its content. It is written under another name and
renamed when complete, so that one that exists is whole, and under a lock, so that two runs at once make it once.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gkd.config import Data, user_path
from gkd.data.task import ReportFn
from gkd.durable import apply_umask, hold
from gkd.errors import ConfigError, RunFailed

MAKING_TIMEOUT_S = 1800.0


def cache_directory(data: Data) -> Path:
    """Return ``data.cache_dir``, else ``$XDG_CACHE_HOME/gkd``, else ``~/.cache/gkd``; not made here."""
    if data.cache_dir is not None:
        return user_path(data.cache_dir).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "gkd"


def make_cache(data: Data) -> Path:
    """Make the cache's directory and return it. Raises ConfigError where that is not possible."""
    cache = cache_directory(data)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{cache} cannot be made ({error.strerror}): name another with data.cache_dir=DIR") from None
    return cache


@contextmanager
def make_entry(directory: Path, report: ReportFn) -> Iterator[Path | None]:
    """Yield a directory to fill that becomes the cache entry ``directory``; None when the entry is there already.

    Waits while another process makes the same entry. Raises RunFailed when that takes too long, and ConfigError where
    nothing can be written.
    """
    if directory.exists():  # whole, as it came by its name at once, and maybe where nothing can be written
        yield None
        return
    try:
        opened = directory.with_suffix(".lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"{directory.parent} cannot be written ({error.strerror}): name another with data.cache_dir=DIR"
        ) from None
    with opened as lock:
        _acquire(lock.fileno(), directory, report)
        if directory.exists():
            yield None
            return
        unfinished = directory.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed: the lock is ours now
        unfinished.mkdir()
        try:
            yield unfinished
            apply_umask([file for file in unfinished.rglob("*") if file.is_file()])  # others may share the cache
            unfinished.rename(directory)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _acquire(lock: int, directory: Path, report: ReportFn) -> None:
    deadline = time.monotonic() + MAKING_TIMEOUT_S
    waiting = False
    while not hold(lock):
        if not waiting:
            report(f"another run is making {directory.name}; waiting for it")
        waiting = True
        if time.monotonic() > deadline:
            raise RunFailed(f"another process has been making {directory} for {MAKING_TIMEOUT_S:.0f} s")
        time.sleep(0.2)
