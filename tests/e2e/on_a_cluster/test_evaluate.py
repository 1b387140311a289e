"""An evaluation as a user starts it: two models of the built-in task, killed in the middle and started again."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gkd.config.compose import compose
from gkd.data.task import TaskInputs, task_of
from tests.e2e.conftest import SMALL
from tests.error_text import contains_in_order

SETS = {"first": 12, "second": 4, "third": 2}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


ENGINE = ["rollout.engine=hf", "rollout.max_num_seqs=8", "rollout.max_response_length=12", "cluster.cpu_threads=1"]
REWARDS = '''
async def shorter(completion_ids, completions, trainer_state, answer, **kwargs):
    """TRL's kind, async: among the samples of a question, the share that is not shorter."""
    assert trainer_state.global_step == trainer_state.max_steps and set(answer) == {answer[0]}
    lengths = [len(ids) for ids in completion_ids]
    assert all(len(text.split()) == n for text, n in zip(completions, lengths, strict=True))
    return [sum(other >= own for other in lengths) / len(lengths) for own in lengths]


def size(group, factor=1.0):
    return [factor * len(group)] * len(group)
'''


@pytest.fixture
def made(cache: Path) -> TaskInputs:
    """The small task's models and data."""
    return task_of(compose(["+recipe=on_policy_distill", *SMALL, f"data.cache_dir={cache}"])).make(print)


def test_an_evaluation_that_was_killed_goes_on(tmp_path: Path, made: TaskInputs, variables: dict[str, str]) -> None:
    command = [sys.executable, "-m", "gkd.evaluate", f"models.base={made.student}", f"models.teacher={made.teacher}"]
    command += [*ENGINE, "rollout.gpus=0-1", f"evaluate.output_dir={tmp_path}/out"]
    command += ["evaluate.strategies=[plain,adaptive,fixed_k]"]
    for name, limit in SETS.items():
        values = f"{{files: {made.val_files}, answer_key: answer, limit: {limit}, samples: 3, temperature: 1.0}}"
        command.append(f"evaluate.sets.{name}={values}".replace("'", ""))
    answers = tmp_path / "out" / "answers.jsonl"
    with (tmp_path / "first.txt").open("wb") as output:
        first = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=output, stderr=output)
        deadline = time.monotonic() + 240
        while not (answers.exists() and answers.read_bytes().count(b"\n") >= 20):
            assert first.poll() is None and time.monotonic() < deadline, (tmp_path / "first.txt").read_text()
            time.sleep(0.02)
        first.send_signal(signal.SIGKILL)
        first.wait(timeout=30)
    before = answers.read_bytes()
    kept = before[: before.rindex(b"\n") + 1]
    n_kept = kept.count(b"\n")
    assert n_kept < 324

    second = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert second.returncode == 0, second.stderr
    assert f"{n_kept} of 324 " in second.stdout
    assert answers.read_bytes().startswith(kept)
    answer_rows = rows(answers)
    keys = [(row["fingerprint"], row["set"], row["question"], row["index"], row["strategy"]) for row in answer_rows]
    assert len(keys) == len(set(keys)) == 324
    results = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out" / "results").iterdir()}
    assert sorted(results) == sorted(
        f"{model}{strategy}_{name}_{limit}.json"
        for model in ("base", "teacher")
        for strategy in ("", ".adaptive", ".fixed_k")
        for name, limit in SETS.items()
    )
    sooner, later = (results[f"base.{name}_first_12.json"]["scores"] for name in ("adaptive", "fixed_k"))
    assert 1 <= sooner["iterations"]["value"] < later["iterations"]["value"] == 4
    assert sooner["cost"]["value"] < later["cost"]["value"]
    table = next(line.split() for line in second.stdout.splitlines() if line.startswith("set "))
    assert {"accuracy", "cost", "iterations"} <= set(table)
    teacher, base = results["teacher_first_12.json"]["scores"], results["base_first_12.json"]["scores"]
    assert teacher["accuracy"]["value"] > 0.8 > base["accuracy"]["value"]
    plain = [row for row in answer_rows if row["strategy"] == "plain"]
    right = [row["text"] == row["answer"] for row in plain if row["model"] == "teacher" and row["set"] == "first"]
    assert abs(teacher["accuracy"]["value"] - sum(right) / len(right)) < 1e-9
    assert base["pass@3"]["value"] >= base["accuracy"]["value"]
    assert re.search(r"first: teacher .*higher .*base", second.stdout)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system for some fifty answers."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", path]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root can make a small file system")
    yield path
    subprocess.run(["umount", path], check=True)


def test_an_evaluation_that_filled_the_disk_goes_on_and_groups_are_rewarded(
    small_disk: Path, tmp_path: Path, made: TaskInputs, variables: dict[str, str]
) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    command = [sys.executable, "-m", "gkd.evaluate", f"models.base={made.student}", *ENGINE, "evaluate.mode=single"]
    command += [f"evaluate.output_dir={small_disk}", f"evaluate.sets.own.files=[{made.val_files[0]}]"]
    own = {"answer_key": "answer", "limit": 24, "samples": 4, "temperature": 1.0}
    command += [f"evaluate.sets.own.{name}={value}" for name, value in own.items()]
    command += ["evaluate.sets.own.rewards=[mine.py:shorter,mine.py:size]", "reward.size.factor=0.5"]

    def evaluate() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240, check=False
        )

    first = evaluate()
    answers = small_disk / "answers.jsonl"
    assert first.returncode == 1 and contains_in_order(first.stderr, "failed: ", answers), first.stdout
    kept = answers.read_bytes()
    n_kept = kept.count(b"\n")
    assert 0 < n_kept < 96
    subprocess.run(["mount", "-o", "remount,size=1m", small_disk], check=True)
    second = evaluate()
    assert second.returncode == 0, second.stderr
    assert f"{n_kept} of 96 " in second.stdout
    assert answers.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1]) and len(rows(answers)) == 96
    scores = json.loads((small_disk / "results" / "base_own_24.json").read_text())["scores"]
    assert scores["reward/size"]["value"] == 2.0  # half of four
    assert 0.5 < scores["reward/shorter"]["value"] < 1
