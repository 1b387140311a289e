"""Models and data of the built-in task, made once and kept in a cache.

A cache entry is a directory named after everything that determines its content. It is written under another name and
renamed when complete, so that one that exists is whole, and under a lock, so that two runs at once make it once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import gkd
from gkd.config import Builtin, Config, user_path
from gkd.data.sorting import examples, write_examples
from gkd.errors import ConfigError, RunFailed

RECIPE_VERSION = 1  # raise it when the same settings make other models or data
MAKING_TIMEOUT_S = 1800.0
VAL_SEED = 1_000_003

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """Everything that determines one of the two models.

    ``stop_at`` ends the training once that share of fresh prompts is answered exactly, so that students of all seeds
    start equally able; without it, all ``steps`` are made and the learning rate falls to zero over them.
    """

    name: str
    digits: int
    layers: int
    width: int
    heads: int
    steps: int
    batch: int
    lr: float
    stop_at: float | None
    seed: int

    def directory(self, cache: Path) -> Path:
        """Where the model lies in the cache."""
        return _entry(cache, self.name, asdict(self))


@dataclass(frozen=True, slots=True)
class BuiltinPaths:
    """What a run on the built-in task needs, as its settings would name it."""

    student: str
    teacher: str | None
    train_files: list[str]
    val_files: list[str]


def recipes(builtin: Builtin, seed: int) -> tuple[ModelRecipe, ModelRecipe]:
    """Teacher and student. The teacher has one seed always, so that runs of different seeds share it."""
    teacher = ModelRecipe(
        name="teacher",
        digits=builtin.digits,
        layers=3,
        width=128,
        heads=4,
        steps=builtin.teacher_steps,
        batch=128,
        lr=3e-3,
        stop_at=None,
        seed=0,
    )
    student = replace(
        teacher,
        name="student",
        layers=2,
        width=64,
        heads=2,
        steps=builtin.student_steps,
        batch=64,
        lr=2e-3,
        stop_at=0.25,
        seed=seed,
    )
    return teacher, student


def cache_directory(builtin: Builtin) -> Path:
    """``builtin.cache_dir``, else ``$XDG_CACHE_HOME/gkd``, else ``~/.cache/gkd``."""
    if builtin.cache_dir is not None:
        return user_path(builtin.cache_dir).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "gkd"


def prepare_builtin(config: Config, say: Say) -> BuiltinPaths:
    """Make what the cache lacks, and return where everything is: a teacher only where the algorithm asks one.

    ``say`` is told the progress, a line at a time.
    Models are trained in a process of its own, which ends with this one. Raises RunFailed when it fails.
    """
    cache = cache_directory(config.builtin)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{cache} cannot be made ({error.strerror}): name another with builtin.cache_dir=DIR"
        ) from None
    teacher, student = recipes(config.builtin, config.trainer.seed)
    missing: list[ModelRecipe] = []
    wanted = [teacher, student] if config.algorithm.needs_teacher else [student]
    for recipe in wanted:
        if recipe.directory(cache).exists():
            say(f"{recipe.name}: cached in {recipe.directory(cache)}")
        else:
            missing.append(recipe)
    if missing:
        _run_warmup(cache, missing, say)
    data = _make_data(cache, config, say)
    return BuiltinPaths(
        student=str(student.directory(cache)),
        teacher=str(teacher.directory(cache)) if config.algorithm.needs_teacher else None,
        train_files=[str(data / "train.jsonl")],
        val_files=[str(data / "val.jsonl")],
    )


@contextmanager
def making(directory: Path, say: Say) -> Iterator[Path | None]:
    """A directory to fill that becomes the cache entry ``directory``; None when the entry is there already.

    Waits while another process makes the same entry. Raises RunFailed when that takes too long.
    """
    with directory.with_suffix(".lock").open("w") as lock:
        _acquire(lock.fileno(), directory, say)
        if directory.exists():
            yield None
            return
        unfinished = directory.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed: the lock is ours now
        unfinished.mkdir()
        try:
            yield unfinished
            unfinished.rename(directory)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _acquire(lock: int, directory: Path, say: Say) -> None:
    deadline = time.monotonic() + MAKING_TIMEOUT_S
    waiting = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waiting:
                say(f"another run is making {directory.name}; waiting for it")
            waiting = True
        else:
            return
        if time.monotonic() > deadline:
            raise RunFailed(f"another process has been making {directory} for {MAKING_TIMEOUT_S:.0f} s")
        time.sleep(0.2)


def _entry(cache: Path, name: str, determined_by: object) -> Path:
    key = hashlib.sha256(json.dumps([RECIPE_VERSION, name, determined_by], sort_keys=True).encode()).hexdigest()
    return cache / f"sorting-{name}-{key[:16]}"


def _make_data(cache: Path, config: Config, say: Say) -> Path:
    digits, seed = config.builtin.digits, config.trainer.seed
    directory = _entry(cache, "data", [digits, seed])
    with making(directory, say) as unfinished:
        if unfinished is not None:
            write_examples(unfinished / "train.jsonl", examples(seed, digits, "train"))
            write_examples(unfinished / "val.jsonl", examples(VAL_SEED, digits, "val"))
    return directory


def _run_warmup(cache: Path, missing: list[ModelRecipe], say: Say) -> None:
    names = " and ".join(recipe.name for recipe in missing)
    # The child may be started from any directory, and gkd need not be installed.
    paths = [str(Path(gkd.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Threads that spin while they wait make training several times slower as soon as anything else uses the cores.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "gkd.data.warmup", str(cache), json.dumps([asdict(recipe) for recipe in missing])],
            stdin=subprocess.PIPE,  # never written to: its end tells the child that this process is gone
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            text=True,
        )
        timer = threading.Timer(MAKING_TIMEOUT_S, child.kill)
        timer.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                say(line.rstrip())
            code = child.wait()
        finally:
            timer.cancel()
            _end(child)
        if code != 0:
            errors.seek(0)
            told = [line.strip() for line in errors if line.strip()]
            reason = told[-1] if told else f"it ended by {_ending(code)}"
            raise RunFailed(f"making the built-in {names} failed: {reason}")


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _end(child: subprocess.Popen[str]) -> None:
    """End the child if it still runs: asked first, so that it removes what it has not finished."""
    with child:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()
