"""A run that a Python program does, with a callback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import SMALL

PROGRAM = """
import json, sys
import gkd
assert "torch" not in sys.modules and "ray" not in sys.modules
from gkd import evaluate, plan, train
assert all(map(callable, (evaluate, plan, train)))
settings, seen = json.loads(sys.argv[1]), []
done = train(settings, on_step=lambda step, metrics: seen.append([step, metrics.get("actor/loss")]))
summary = done.summary
print(json.dumps({"seen": seen, "steps": summary.steps, "after": summary.after, "model": str(done.model)}))
"""


def test_a_run_is_done_and_its_summary_returned(tmp_path: Path, cache: Path, variables: dict[str, str]) -> None:
    small = dict(setting.split("=") for setting in SMALL)
    settings = {name: int(value) for name, value in small.items()} | {
        "recipe": "grpo", "rollout.engine": "hf", "data.cache_dir": str(cache), "data.val_limit": 4,
        "trainer": {"total_steps": 2, "batch_size": 4, "val_every": 2, "output_dir": str(tmp_path / "run")},
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(settings)],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, env=variables, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert found["seen"] == [[row["step"], row.get("actor/loss")] for row in rows] and len(rows) == 3
    assert found["steps"] == 2
    assert found["after"] == {name: value for name, value in rows[-1].items() if name.startswith("val/")}
    assert (Path(found["model"]) / "config.json").exists()
