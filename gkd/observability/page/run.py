"""What the page shows of one run, from its files; JSON values alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gkd.cluster.gpu import are_simulated
from gkd.config import Config
from gkd.config.compose import compose
from gkd.config.device import GB
from gkd.config.loading import dump_public, read_yaml
from gkd.config.output_files import CONFIG, TIMELINE, parse
from gkd.config.overrides import flatten
from gkd.errors import ConfigError, describe_error
from gkd.observability.metrics import Z_95, wilson_interval
from gkd.observability.report import MEASURED, Summary
from gkd.observability.run_files import RunFiles
from gkd.planning.layout import Layout, cpu_hardware, gpu_hardware, models_of
from gkd.planning.memory.colocation import all_memory

MAX_ROWS = 10_000
"""Steps in a chart; of more, every so many are taken, and all validations."""
MAX_SPANS = 5_000
MAX_EVENTS = 5_000
DIGITS = 7
OWN = {"model.size": "1b", "data.train_files": "[x]", "data.val_files": "[x]", "data.answer_key": "answer"}
"""What stands for models and data of one's own, with which a recipe is without the built-in task's settings."""
OF_THE_RUN = (
    "trainer.output_dir",
    "trainer.resume",
    "trainer.run_name",
    "trainer.run_group",
    "data.cache_dir",
    "reward.set_functions",
)
"""Settings that state what a run is called and where it is, and what is filled in."""


def describe(files: RunFiles) -> dict[str, Any]:
    """Return everything but the samples. Raises ConfigError for a file that cannot be read."""
    tree, all_rows = read_yaml(files.path / CONFIG), files.rows
    rows, events = thin_out(all_rows), [event for event in files.events if event["kind"] != "validation"]
    requested, ran, summary = files.read_config(as_requested=True), files.read_config(), files.summary()
    return {
        "name": files.path.absolute().name,
        "path": str(files.path.absolute()),
        "recipe": str(tree.get("recipe")),
        "version": _version(files.path / CONFIG),
        "total_steps": files.total_steps,
        "steps": [row["step"] for row in rows],
        "thinned": len(rows) < len(all_rows),
        "cut": len(events) > MAX_EVENTS,
        "metrics": collect_columns(rows),
        "events": events[-MAX_EVENTS:],
        "summary": None if summary is None else asdict(summary),
        "n_val": 0 if summary is None else summary.n_val,
        "intervals": {} if summary is None else read_intervals(summary),
        "differs": None if requested is None else list_differences(requested),
        "placement": [
            [
                p["group"],
                p.get("rank"),
                p["node"],
                str(p["pid"]),
                p.get("cuda_visible_devices"),
                ",".join(p["gpu_uuids"]),
            ]
            for p in files.placement()
        ],
        "plan": {} if ran is None else read_planned_gb(ran, files.placement()),
        "timeline": read_spans(files.path / TIMELINE),
    }


def thin_out(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of at most :data:`MAX_ROWS` steps, evenly, and all with a validation."""
    last = len(rows) - 1  # the first is of step 0
    every = -(-last // MAX_ROWS) or 1
    return [
        row
        for number, row in enumerate(rows)
        if number % every == 0 or number == last or any(name.startswith("val/") for name in row)
    ]


def collect_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Return each metric's values [rows], null where a row has none, in :data:`DIGITS` digits."""
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    return {name: [_shorten(row.get(name)) for row in rows] for name in names}


def _shorten(value: Any) -> float | None:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, int | float) and math.isfinite(value) else None


def read_intervals(summary: Summary) -> dict[str, dict[str, tuple[float, float]]]:
    """Return 95 % intervals of accuracies before, after and of the teacher: Wilson's of ``val/accuracy``.

    Those of ``val/NAME/accuracy`` are of its standard error, as an answer of a set may be a mean over samples.
    """
    n, bounds = summary.n_val, dict[str, dict[str, tuple[float, float]]]()
    for when in MEASURED:
        values: Mapping[str, float] = getattr(summary, when)
        for name, value in values.items():
            stderr = values.get(f"{name.removesuffix('accuracy')}stderr") if name.endswith("/accuracy") else None
            if name == "val/accuracy" and n and 0 <= value <= 1:
                bounds.setdefault(name, {})[when] = wilson_interval(value, n)
            elif stderr is not None:
                bounds.setdefault(name, {})[when] = (value - Z_95 * stderr, value + Z_95 * stderr)
    return bounds


def list_differences(config: Config) -> list[tuple[str, Any, Any]] | None:
    """Return settings with other values than the recipe's: name, there, here; None for a recipe that is not shipped.

    With models of one's own it is without the settings of the built-in task.
    """
    stand_ins: dict[str, str] = {}
    try:
        recipe = compose([f"+recipe={config.recipe}"])
        if not config.uses_task:
            stand_ins = OWN | ({"teacher.model.size": "1b"} if recipe.algorithm.needs_teacher else {})
            recipe = compose([f"+recipe={config.recipe}", *(f"{name}={value}" for name, value in stand_ins.items())])
    except ConfigError:
        return None
    recipe_values = flatten(dump_public(recipe)) | dict.fromkeys(stand_ins)
    run_values = flatten(dump_public(config))
    return [
        (name, recipe_values.get(name), run_values.get(name))
        for name in sorted({*recipe_values, *run_values})
        if name not in OF_THE_RUN and recipe_values.get(name) != run_values.get(name)
    ]


def read_planned_gb(config: Config, placement: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the plan's memory of one worker of each group, 10^9 bytes; empty where it cannot be planned here."""
    try:
        on_cpu = are_simulated(uuid for worker in placement for uuid in worker["gpu_uuids"])
        hardware = cpu_hardware(config.plan) if on_cpu else gpu_hardware(config.plan)
        return {group.group: group.total / GB for group in all_memory(Layout(config, models_of(config), hardware))}
    except ConfigError:  # its models are not on this machine, or its GPU is not known here
        return {}


def read_spans(file: Path) -> list[dict[str, Any]]:
    """Return the newest complete events of a Chrome trace, seconds; none where there is no file.

    Those are at most :data:`MAX_SPANS`, of whole steps; of one that has more the last ones. ``lane``: the worker;
    ``why``: an idle span's cause. Raises ConfigError for a file that is no trace.
    """
    if not file.exists():
        return []
    try:
        trace = parse(_cut_events(file.read_text(encoding="utf-8")).encode())
        events = trace["traceEvents"] if isinstance(trace, dict) else trace
        names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
        spans = [
            {
                "name": e["name"],
                "lane": str(names.get(e["pid"], e["pid"])),
                "start": e["ts"] / 1e6,
                "length": e.get("dur", 0) / 1e6,
                "step": int(e.get("args", {}).get("step", 0)),
                "why": e.get("args", {}).get("why") or e.get("args", {}).get("cause"),
            }
            for e in [e for e in events if e["ph"] == "X"][-MAX_SPANS - 1 :]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is no Chrome trace: {describe_error(error)}") from None
    if len(spans) <= MAX_SPANS:
        return spans
    return [span for span in spans if span["step"] != spans[0]["step"]] or spans[1:]


def _cut_events(trace: str) -> str:
    """Return the text of a trace without most of what comes before its newest events: of 100 MB parsing takes seconds.

    A text like this begins no object within a string of JSON, whose quotes are escaped.
    """
    begins, at = '{"ph": "X"', len(trace)
    for _ in range(MAX_SPANS + 1):
        if (at := trace.rfind(begins, 0, at)) < 0:
            return trace
    return trace[: trace.index(begins)] + trace[at:]


def _version(file: Path) -> str | None:
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("# gkd ").strip() if first.startswith("# gkd ") else None
