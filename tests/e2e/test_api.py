"""A Python program: supervised training, which samples for validation alone, and an evaluation of its checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
settings = {"cluster.cpu_threads": 1, "evaluate.output_dir": str(done.output_dir / "measured")}
results = [[own.model, own.set, own.n, own.scores["accuracy"].value] for own in evaluate(settings, run=done.output_dir)]
print(json.dumps({"seen": seen, "steps": summary.steps, "after": summary.after, "model": str(done.model),
                  "results": results}))
"""


def test_a_run_is_done_and_its_summary_returned(tmp_path: Path, cache: Path, variables: dict[str, str]) -> None:
    small = dict(setting.split("=") for setting in SMALL)
    settings = {name: int(value) for name, value in small.items()} | {
        "recipe": "sft", "rollout.engine": "hf", "data.cache_dir": str(cache), "data.val_limit": 32,
        "actor.lr": 1e-2, "algorithm.aggregation": "constant",
        "trainer": {"total_steps": 3, "batch_size": 4, "val_every": 1, "save_every": 2,
                    "output_dir": str(tmp_path / "run")},
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(settings)],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, env=variables, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert result["seen"] == [[row["step"], row.get("actor/loss")] for row in rows] and len(rows) == 4
    assert result["steps"] == 3
    assert result["after"] == {name: value for name, value in rows[-1].items() if name.startswith("val/")}
    (questions,) = cache.glob("sorting-data-*/val.jsonl")
    held_out = [json.loads(line) for line in questions.read_text().splitlines()[:32]]
    (student,) = (path.parent for path in cache.glob("sorting-student-*/config.json"))
    for path, row in ((student, rows[0]), (result["model"], rows[-1])):
        assert row["val/loss"] == pytest.approx(cross_entropy(path, held_out), abs=1e-4)
    # Where it began, its checkpoints and the trained student: weights loaded into the engines answer as validation did.
    measured = {f"step_{row['step']}": row["val/accuracy"] for row in rows if row["step"] != 1}
    assert result["results"] == [[name, "val", 32, pytest.approx(accuracy)] for name, accuracy in measured.items()]
    assert len(set(measured.values())) > 1
    assert len(list((tmp_path / "run" / "measured" / "results").iterdir())) == 3


def cross_entropy(path: Path, rows: list[dict[str, str]]) -> float:
    """transformers' own loss on the answers and their end token, nats a token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    losses, n = [], []
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["answer"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * len(prompt) + answer])
        losses.append(model(input_ids=torch.tensor([prompt + answer]), labels=labels).loss.item() * len(answer))
        n.append(len(answer))
    return sum(losses) / sum(n)
