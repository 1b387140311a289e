"""Timings of an earlier run in place of assumptions: its measured stages against the plan of its own layout."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from gkd.config import Config, load
from gkd.config.file import read_yaml
from gkd.errors import ConfigError
from gkd.planning.stages import Stages, stages_of
from gkd.planning.subject import Subject, changed, models_of

SCORING_LED = 0.2  # beyond this share of sampling, what scoring took after it says how long scoring takes in all


@dataclass(frozen=True, slots=True)
class Factors:
    """Measured over planned seconds of each stage, and the mean lengths the run had (None: not measured)."""

    generate: float = 1.0
    score: float = 1.0
    update: float = 1.0
    sync: float = 1.0
    prompt: int | None = None
    response: int | None = None

    def lengths(self, config: Config) -> Config:
        """The configuration with the run's mean lengths, where it does not say its own."""
        told = {"plan.prompt_length": self.prompt, "plan.response_length": self.response}
        plan = config.plan.model_dump()
        return changed(config, {k: v for k, v in told.items() if v and plan[k.removeprefix("plan.")] is None})

    def apply(self, stages: Stages) -> Stages:
        """Planned stages in the measured run's terms."""
        return Stages(
            stages.generate * self.generate,
            stages.score * self.score,
            stages.reference * self.score,
            stages.update * self.update,
            stages.sync * self.sync,
            stages.tail * self.score,
            stages.reward * self.score,
        )


def factors_of(directory: str, subject: Subject) -> Factors:
    """From a run's config.yaml and metrics.jsonl, on the card of ``subject``. Raises ConfigError for what is no run."""
    path = Path(directory)
    _require_same_device(path, subject)
    config, rows = _config(path), _rows(path)
    lengths = Factors(prompt=_prompt(config, rows), response=_rounded(rows, "response/length_mean"))
    config = lengths.lengths(config)
    planned = stages_of(replace(subject, config=config, models=models_of(config)))
    seen = {name: _median(rows, name) for name in ("generate", "score", "update", "sync")}
    score = 1.0
    judged = max(planned.score, planned.reference, planned.reward)
    if judged and seen["score"] > SCORING_LED * seen["generate"]:
        score = (seen["generate"] + seen["score"]) / (judged + planned.tail)
    return replace(
        lengths,
        generate=seen["generate"] / planned.generate,
        score=score,
        update=seen["update"] / planned.update,
        sync=seen["sync"] / planned.sync,
    )


def _require_same_device(path: Path, subject: Subject) -> None:
    """Raise ConfigError where the run computed on CPUs and the plan is of GPUs, or the other way round."""
    try:
        placed = json.loads((path / "placement.json").read_text(encoding="utf-8"))
        on_cpu = all(uuid.startswith("SIM-") for row in placed for uuid in row["gpu_uuids"])
    except OSError:
        return  # the files that are needed say what is missing
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--from {path}: placement.json cannot be read: {error}") from None
    if on_cpu != subject.card.is_cpu:
        ran, planned = ("CPUs", "GPUs (plan.card)") if on_cpu else ("GPUs", "CPUs")
        raise ConfigError(f"--from {path}: that run computed on {ran}, and this plan is of {planned}")


def _config(path: Path) -> Config:
    try:
        tree = read_yaml(path / "config.yaml")
    except ConfigError as error:
        raise ConfigError(f"--from {error}") from None
    return load(tree)


def _rows(path: Path) -> list[dict[str, Any]]:
    """Of every step with timings but the first, which warms up."""
    try:
        lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if isinstance(row, dict) and "timing_s/update" in row]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--from {path}: metrics.jsonl cannot be read: {error}") from None
    if not rows:
        raise ConfigError(f"--from {path}: metrics.jsonl has no step with timings yet")
    if odd := [name for row in rows for name, value in row.items() if not isinstance(value, int | float)]:
        raise ConfigError(f"--from {path}: metrics.jsonl has a {odd[0]} that is no number")
    return rows[1:] or rows


def _median(rows: list[dict[str, Any]], stage: str) -> float:
    return float(median(row.get(f"timing_s/{stage}", 0.0) for row in rows))


def _rounded(rows: list[dict[str, Any]], name: str) -> int | None:
    values = [row[name] for row in rows if name in row]
    return max(1, round(mean(values))) if values else None


def _prompt(config: Config, rows: list[dict[str, Any]]) -> int | None:
    """Mean tokens of a prompt: all of a step's tokens, without the responses'."""
    samples = config.trainer.batch_size * config.rollout.n
    needed = ("perf/tokens_per_second", "timing_s/step", "response/length_mean")
    found = [
        row["perf/tokens_per_second"] * row["timing_s/step"] / samples - row["response/length_mean"]
        for row in rows
        if all(name in row for name in needed)
    ]
    return max(1, round(mean(found))) if found else None
