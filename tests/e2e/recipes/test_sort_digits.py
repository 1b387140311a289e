"""The built-in task's models, made in a process of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from gkd.data.task import TaskInputs
from gkd.data.tokenizer import check_causal_lm, check_same_tokenizer
from gkd.errors import RunFailed
from gkd.recipes.sort_digits import task
from gkd.recipes.sort_digits.task import SortDigits, recipes
from tests.recipes.test_sort_digits import config, entries, prepare


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TaskInputs, list[str]]:
    cache, lines = tmp_path_factory.mktemp("cache"), list[str]()
    return cache, prepare(config(cache), lines.append), lines


def test_made_models_load_and_share_a_tokenizer(made: tuple[Path, TaskInputs, list[str]]) -> None:
    _, paths, lines = made
    for path, layers in ((paths.teacher, 3), (paths.student, 2)):
        check_causal_lm(path, "model.path")
        model = AutoModelForCausalLM.from_pretrained(path)
        assert (model.config.num_hidden_layers, model.config.head_dim) == (layers, 32)
        assert model.dtype == torch.float32
        assert model.generation_config.eos_token_id == 2
    check_same_tokenizer(paths.student, paths.teacher)
    assert any(line.startswith("teacher: step 1 of 1, loss ") for line in lines)
    assert any(re.match(r"student: step 1 .*\b1, loss ", line) for line in lines)
    for files in (paths.train_files, paths.val_files):
        assert json.loads(Path(files[0]).read_text().splitlines()[0]).keys() == {"prompt", "answer"}


def test_what_is_cached_starts_no_process(
    made: tuple[Path, TaskInputs, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, paths, _ = made
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    lines: list[str] = []
    assert prepare(config(cache), lines.append) == paths
    assert [line.split(":")[0] for line in lines] == ["teacher", "student"]


def test_a_failure_names_its_reason_and_leaves_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student = recipes(SortDigits.Config(digits=3), 0)
    monkeypatch.setattr(task, "recipes", lambda *_: (replace(teacher, batch=-1), student))
    with pytest.raises(RunFailed, match=r"teacher .*: \S.*"):
        prepare(config(tmp_path), lambda _: None)
    assert entries(tmp_path) == []


def test_an_interruption_ends_the_process_and_leaves_nothing_half_made(tmp_path: Path) -> None:
    def report(line: str) -> None:
        if "step 25" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config(tmp_path, teacher_steps=100_000), report)
    assert entries(tmp_path) == []
    assert not [child for child in psutil.Process().children() if "sort_digits.warmup" in command_of(child)]


def command_of(process: psutil.Process) -> str:
    """Return the command line of a process; empty of one that has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_the_process_ends_with_a_killed_parent(tmp_path: Path) -> None:
    program = (
        "from gkd.config import load; from gkd.data.task import task_of\n"
        f"own = dict(digits=3, teacher_steps=100000); cache = {str(tmp_path)!r}\n"
        "config = load(dict(data=dict(task='sort_digits', cache_dir=cache, sort_digits=own)))\n"
        "task_of(config).make(lambda line: print(line, flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert any("step 25" in line for line in parent.stdout)
        (child,) = psutil.Process(parent.pid).children()
        os.kill(parent.pid, signal.SIGKILL)
        child.wait(30)
    assert entries(tmp_path) == []


def test_the_driver_loads_no_torch() -> None:
    modules = "gkd.recipes.sort_digits.task, gkd.data.prompts, gkd.rewards.accuracy"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
