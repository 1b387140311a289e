"""An evaluation as a user starts it: two models of the built-in task, killed in the middle and started again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.e2e.conftest import SMALL

SETS = {"first": 24, "second": 8, "third": 4}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_evaluation_that_was_killed_goes_on(tmp_path: Path, cache: Path, variables: dict[str, str]) -> None:
    from gkd.config.compose import compose
    from gkd.data.task import task_of

    config = compose(["+recipe=on_policy_distill", *SMALL, f"data.cache_dir={cache}"])
    made = task_of(config).make(print)
    command = [sys.executable, "-m", "gkd.evaluate", f"models.base={made.student}", f"models.teacher={made.teacher}"]
    command += [
        "rollout.engine=hf",
        "rollout.max_num_seqs=8",
        "rollout.max_response_length=12",
        "cluster.cpu_threads=1",
    ]
    command += [f"evaluate.output_dir={tmp_path}/out", "evaluate.strategies=[plain,self_consistency]"]
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
    assert n_kept < 432

    second = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert second.returncode == 0, second.stderr
    assert f"{n_kept} of 432 answers are there already" in second.stdout
    assert answers.read_bytes().startswith(kept)
    found = rows(answers)
    keys = [(row["fingerprint"], row["set"], row["question"], row["index"], row["strategy"]) for row in found]
    assert len(keys) == len(set(keys)) == 432
    results = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out" / "results").iterdir()}
    assert sorted(results) == sorted(
        f"{model}{strategy}_{name}_{limit}.json"
        for model in ("base", "teacher")
        for strategy in ("", ".self_consistency")
        for name, limit in SETS.items()
    )
    voted = results["base.self_consistency_first_24.json"]["scores"]
    assert voted["iterations"]["value"] == 5 and voted["cost"]["value"] > 15
    teacher, base = results["teacher_first_24.json"]["scores"], results["base_first_24.json"]["scores"]
    assert teacher["accuracy"]["value"] > 0.8 > base["accuracy"]["value"]
    plain = [row for row in found if row["strategy"] == "plain"]
    right = [row["text"] == row["answer"] for row in plain if row["model"] == "teacher" and row["set"] == "first"]
    assert abs(teacher["accuracy"]["value"] - sum(right) / len(right)) < 1e-9
    assert base["pass@3"]["value"] >= base["accuracy"]["value"]
    assert "first: teacher has a higher accuracy than base" in second.stdout
