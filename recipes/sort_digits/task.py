"""Models and data of the task, made once and kept in a cache."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

import gkd
from gkd.config import Config as RunConfig
from gkd.config import Settings
from gkd.data.cache import MAKING_TIMEOUT_S, make_cache, make_entry
from gkd.data.task import ReportFn, Task, TaskInputs
from gkd.errors import RunFailed

from .sorting import BOS_ID, EOS_ID, PAD_ID, VOCABULARY, examples, write_examples

HEAD_DIM = 32  # the smallest that vLLM's CPU attention takes
RECIPE_VERSION = 1  # raise it when the same settings make other models or data
VAL_SEED = 1_000_003


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
        """Return where the model lies in the cache."""
        return _entry(cache, self.name, asdict(self))

    def llama_config(self) -> dict[str, Any]:
        """Return arguments of the model's LlamaConfig: float32, embeddings not tied."""
        return {
            "vocab_size": len(VOCABULARY),
            "hidden_size": self.width,
            "intermediate_size": 2 * self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": 128,
            "rope_theta": 1000.0,
            "tie_word_embeddings": False,
            "pad_token_id": PAD_ID,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "dtype": "float32",
        }


def recipes(settings: SortDigits.Config, seed: int) -> tuple[ModelRecipe, ModelRecipe]:
    """Return teacher and student. The teacher has one seed always, so that runs of different seeds share it."""
    teacher = ModelRecipe(
        name="teacher",
        digits=settings.digits,
        layers=3,
        width=128,
        heads=4,
        steps=settings.teacher_steps,
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
        steps=settings.student_steps,
        batch=64,
        lr=2e-3,
        stop_at=0.25,
        seed=seed,
    )
    return teacher, student


class SortDigits(Task):
    """Sorts digits. Trains the models that the cache lacks, in a process that ends with this one."""

    token_settings: ClassVar[str | None] = "sort_digits"
    reward_settings: ClassVar[str | None] = "sort_digits_rewards"

    class Config(Settings):
        """How hard the task is, and how able its models are at the start."""

        digits: int = Field(8, ge=2, le=32, description="digits to sort")
        teacher_steps: int = Field(
            400, ge=1, description="supervised steps the teacher is trained for, once, then cached"
        )
        student_steps: int = Field(
            80,
            ge=1,
            description="supervised steps that warm the student up, fewer once a quarter of fresh prompts is right",
        )

    def __init__(self, settings: Config, config: RunConfig) -> None:
        self.config, self.digits = config, settings.digits
        self.teacher, self.student = recipes(settings, config.trainer.seed)

    def make(self, report: ReportFn) -> TaskInputs:
        """Make what the cache lacks; a teacher only where the algorithm needs one. Raises RunFailed when it fails."""
        cache, needs_teacher = make_cache(self.config.data), self.config.algorithm.needs_teacher
        missing: list[ModelRecipe] = []
        for recipe in [self.teacher, self.student] if needs_teacher else [self.student]:
            if recipe.directory(cache).exists():
                report(f"{recipe.name}: cached in {recipe.directory(cache)}")
            else:
                missing.append(recipe)
        if missing:
            _run_warmup(cache, missing, report)
        data = make_data(cache, self.digits, self.config.trainer.seed, report)
        return TaskInputs(
            student=str(self.student.directory(cache)),
            teacher=str(self.teacher.directory(cache)) if needs_teacher else None,
            train_files=[str(data / "train.jsonl")],
            val_files=[str(data / "val.jsonl")],
        )

    def model_configs(self) -> dict[str, dict[str, Any]]:
        """Return the config.json of both models."""
        models = (self.teacher, self.student)
        return {recipe.name: {"model_type": "llama", **recipe.llama_config()} for recipe in models}


def _entry(cache: Path, name: str, determined_by: object) -> Path:
    key = hashlib.sha256(json.dumps([RECIPE_VERSION, name, determined_by], sort_keys=True).encode()).hexdigest()
    return cache / f"sorting-{name}-{key[:16]}"


def make_data(cache: Path, digits: int, seed: int, report: ReportFn) -> Path:
    """Write the files of prompts into the cache unless they are there, and return their directory."""
    directory = _entry(cache, "data", [digits, seed])
    with make_entry(directory, report) as unfinished:
        if unfinished is not None:
            write_examples(unfinished / "train.jsonl", examples(seed, digits, "train"))
            write_examples(unfinished / "val.jsonl", examples(VAL_SEED, digits, "val"))
    return directory


def _run_warmup(cache: Path, missing: list[ModelRecipe], report: ReportFn) -> None:
    program = [sys.executable, "-m", "gkd.recipes.sort_digits.warmup"]
    names = " and ".join(recipe.name for recipe in missing)
    # The child may be started from any directory, and gkd need not be installed.
    paths = [str(Path(gkd.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Threads that spin while they wait make training several times slower as soon as anything else uses the cores.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        child = subprocess.Popen(
            [*program, str(cache), json.dumps([asdict(recipe) for recipe in missing])],
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
                report(line.rstrip())
            code = child.wait()
        finally:
            timer.cancel()
            _end(child)
        if code != 0:
            errors.seek(0)
            lines = [line.strip() for line in errors if line.strip()]
            reason = lines[-1] if lines else f"it ended by {_describe_exit(code)}"
            raise RunFailed(f"making the built-in {names} failed: {reason}")


def _describe_exit(code: int) -> str:
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
