"""Output directories as runs leave them, made up."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WARNING = {"time": 1.8e9, "kind": "warning", "step": 3, "text": "step 3: lower actor.lr", "metric": "actor/loss"}
NASTY = "</script><script>document.title = 'taken over'</script><!-- &amp; \u2028 \ud800 <img src=x onerror=alert(1)>"

WORKERS = ("driver", "actor 0", "rollout 0")
"""The lanes of :func:`timeline`."""


def lines(rows: Sequence[dict[str, Any]]) -> str:
    """Objects, one a line."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def row(step: int) -> dict[str, float]:
    """The metrics of a step."""
    if step == 0:
        return {"step": 0, "epoch": 0.0, "val/accuracy": 0.25}
    named = {
        "actor/loss": 2 / (1 + step) + 1e-9 / 7,
        "mismatch/kl": -1e-10 * step,
        "response/length_mean": 100 + math.sin(step),
        "timing_s/generate": 1.0,
        "timing_s/wait": 1.25,
        "timing_s/update": 0.5 + step / 1000,
        "timing_s/sync": 0.25,
        "timing_s/step": 2.0 + step / 1000,
        "perf/tokens_per_second": 12345.678,
        "memory/actor/process_gb": 0.5,
        "own/metric": step / 3,
    }
    validated = {"val/accuracy": 0.25 + step / 100} if step % 10 == 0 else {}
    return {"step": step, "epoch": step / 10, **named, **validated}


def sample(step: int, index: int, n: int = 4, text: str = NASTY) -> dict[str, Any]:
    """A logged sample of ``n`` tokens, the second of which the teacher never writes."""
    tokens = {
        "text": [f"{text}{i}" for i in range(n)],
        "student": [-0.5] * n,
        "teacher": [None if i == 1 else -0.5 - i for i in range(n)],
        "top": [[["a", -0.1], [text, -2.5]]] * n,
    }
    means = {"logprob_mean": -0.5, "teacher_logprob_mean": -2.0}
    return {
        "step": step, "prompt": f"{text} {step}", "response": text, "answer": "7", "finish_reason": "stop",
        "version": step - 1, "prompt_id": step, "index": index, "length": n, "rewards": {"accuracy": 1.0, "x": "late"},
        **means, "tokens": tokens,
    }  # fmt: skip


def trace(step: int) -> list[dict[str, Any]]:
    """What a driver, an actor and an engine did in a step of 2 s, as events of timeline.json; the actor waits."""
    begin = 1_000_000 * 2 * step

    def span(pid: int, name: str, start: float, length: float, **args: str) -> dict[str, Any]:
        at = {"ts": begin + int(1e6 * start), "dur": int(1e6 * length)}
        return {"ph": "X", "name": name, "pid": pid, "tid": 0, **at, "args": {"step": step, **args}}

    return [
        span(1, "generate", 0.0, 1.5),
        span(1, "update", 1.5, 0.5),
        span(2, "waits-for-batch", 0.0, 1.5, cause="batch"),
        span(2, "update", 1.5, 0.5),
        span(3, "sample", 0.0, 1.25),
        span(3, "waits-for-tickets", 1.25, 0.25, cause="tickets"),
    ]


def timeline(steps: Sequence[int]) -> str:
    """A timeline.json of some steps."""
    named = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for pid, name in enumerate(WORKERS, start=1)
    ]
    after = trace(steps[-1] + 1)[:1]  # what the driver does when the last step is over
    return json.dumps({"traceEvents": [*named, *(event for step in steps for event in trace(step)), *after]})


def make_run(path: Path, steps: int = 20, samples: Sequence[dict[str, Any]] = ()) -> Path:
    """A run of the recipe grpo with ``steps`` steps, a warning, ``samples``, and the timeline of its last two steps."""
    path.mkdir()
    trainer = {"total_steps": steps}
    config = {"recipe": "grpo", "trainer": trainer, "algorithm": {"name": "grpo"}, "rollout": {"n": 2}}
    (path / "config.yaml").write_text(f"# gkd 0.2.0\n{json.dumps(config)}\n")
    (path / "metrics.jsonl").write_text(lines([row(step) for step in range(steps + 1)]))
    (path / "samples.jsonl").write_text(lines(samples))
    (path / "events.jsonl").write_text(lines([WARNING, {"time": 1.8e9, "kind": "end", "step": steps, "text": NASTY}]))
    val = {"before": {"val/accuracy": 0.25}, "after": {"val/accuracy": 0.45}, "teacher": {}}
    (path / "summary.json").write_text(json.dumps({**val, "steps": steps, "wall_s": 75.0, "n_val": 100}))
    placed = {"group": "actor", "rank": 0, "node": "n", "pid": 4194303, "cuda_visible_devices": "0"}
    (path / "placement.json").write_text(json.dumps([{**placed, "gpu_uuids": ["SIM-0"]}]))
    (path / "timeline.json").write_text(timeline([steps - 1, steps]))
    return path
