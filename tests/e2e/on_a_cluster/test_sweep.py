"""A sweep as a user starts it: its runs one after the other, and what they are compared by at the end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.e2e.conftest import Run


def test_two_runs_are_compared_at_the_end(start: Any, tmp_path: Path) -> None:
    questions = [
        {"prompt": f"{a} {b} {c} =", "answer": " ".join(sorted((a, b, c)))} for a, b, c in ("312", "201", "321")
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    own = {"files": "[own.jsonl]", "answer_key": "answer", "samples": 2, "temperature": 1.0}
    run: Run = start(
        "--multirun", "actor.lr=1e-9,3e-3", "trainer.total_steps=6", "trainer.batch_size=16", "rollout.engine=hf",
        *(f"data.val_sets.own.{name}={value}" for name, value in own.items()), recipe="sft",
    )  # fmt: skip
    assert run.end(300) == 0, run.text()
    text, names = run.log.read_text(), ["actor.lr=1e-09", "actor.lr=0.003"]
    assert [f"run {n} of 2: {name}" in text for n, name in enumerate(names, 1)] == [True, True]
    rows = [re.search(rf"^{re.escape(name)} .*\d \(0\.\d+ to [01]\.\d+\).*\d$", text, re.MULTILINE) for name in names]
    assert all(rows), text
    verdict = rf"val: {names[1]} (has a (higher|lower) accuracy than|and {names[0]} cannot be told apart)"
    assert re.search(verdict, text), text
    page = (run.output / "report.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert [one["name"] for one in data["runs"]] == names
    assert all(set(one["intervals"]) == {"val/accuracy", "val/own/accuracy"} for one in data["runs"])
    before, after = (data["runs"][n]["summary"]["after"]["val/loss"] for n in (0, 1))
    assert after < before  # one of them has learned
    groups = [(run.output / name / "config.yaml").read_text() for name in names]
    assert all(f"run_group: {run.output.name}" in config for config in groups)
