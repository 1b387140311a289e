"""Whole programs, run as a user runs them, on a small version of the built-in task."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import is_described

ROOT = Path(__file__).parents[2]
SMALL = [
    "data.sort_digits.digits=3",
    "data.sort_digits.teacher_steps=60",
    "data.sort_digits.student_steps=40",
    "data.val_limit=64",
    "cluster.cpu_threads=1",
    "reward.workers=1",
]
PAUSE = """
import asyncio
async def pause(completion):
    await asyncio.sleep(1.0)
    return 0.0
"""
"""A reward for runs that go on beside what a test looks at: between their steps others have the cores."""


def environment() -> dict[str, str]:
    """What a fresh shell has: nothing that names another Ray."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "VLLM_", "CUDA_"))}


@dataclass
class Run:
    """A program under way, its output in files."""

    process: subprocess.Popen[bytes]
    output: Path
    log: Path
    pids: set[int] = field(default_factory=set)

    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl so far."""
        file = self.output / "metrics.jsonl"
        if not file.exists():
            return []
        return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]

    def workers(self) -> dict[tuple[str, int], int]:
        """Process ids by group and rank, from placement.json."""
        rows = json.loads((self.output / "placement.json").read_text())
        self.pids |= {row["pid"] for row in rows}
        return {(row["group"], row["rank"]): row["pid"] for row in rows}

    def wait_for_step(self, step: int, timeout_s: float = 240.0) -> None:
        """Until a step is logged; fails when the program ends or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not any(row["step"] >= step for row in self.metrics()):
            assert self.process.poll() is None, f"ended early: {self.text()}"
            assert time.monotonic() < deadline, f"no step {step} in {timeout_s} s: {self.text()}"
            time.sleep(0.2)
        self.workers()

    def end(self, timeout_s: float = 300.0) -> int:
        """The exit code."""
        return self.process.wait(timeout=timeout_s)

    def errors(self) -> list[str]:
        """Lines on standard error."""
        return self.log.with_suffix(".err").read_text().splitlines()

    def text(self) -> str:
        """All that was printed."""
        return self.log.read_text() + "\n".join(self.errors())


def run_here(arguments: list[str]) -> int:
    """Run ``gkd.main`` in this process, where it ends before it starts anything; its exit code."""
    from gkd.cli.train import main

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return main(arguments)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second where it goes between opening and reading
        return False


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the small task's models are kept, for all processes of one test run."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    directory.mkdir(exist_ok=True)
    return directory


@pytest.fixture
def variables() -> dict[str, str]:
    """The environment of programs."""
    return environment()


@pytest.fixture
def start(tmp_path: Path, cache: Path, variables: dict[str, str]) -> Iterator[Any]:
    """Start ``python -m gkd.main`` on the small task; what is still running afterwards is ended and is a failure."""
    runs: list[Run] = []

    def begin(*overrides: str, recipe: str = "on_policy_distill") -> Run:
        number = len(runs)
        output, log = tmp_path / f"run{number}", tmp_path / f"log{number}.out"
        command = [sys.executable, "-m", "gkd.main", f"+recipe={recipe}", *SMALL]
        command += [f"data.cache_dir={cache}", f"trainer.output_dir={output}", *overrides]
        with log.open("wb") as out, log.with_suffix(".err").open("wb") as err:
            process = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=err, env=variables)
        runs.append(Run(process, output, log))
        return runs[-1]

    yield begin
    left = [run for run in runs if run.process.poll() is None]
    for run in left:
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(timeout=60)
    assert not left, "a test ended before its program"
    deadline = time.monotonic() + 60
    while (still := [p for run in runs for p in run.pids if alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not still, f"processes of the run are left: {still}"
    undescribed = {name for run in runs for row in run.metrics() for name in row if not is_described(name)}
    assert not undescribed, f"docs/metrics.md lacks {undescribed}"
