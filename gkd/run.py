"""One run inside a connected Ray: place, start, validate, train, save, report."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console

from gkd.cluster.placement import Placement, PlacementFault, place
from gkd.cluster.session import Session
from gkd.cluster.table import print_table
from gkd.config import Config
from gkd.inputs import Inputs
from gkd.observability import report
from gkd.observability.metrics import JsonLines, finite
from gkd.observability.progress import Progress
from gkd.observability.samples import SampleLog
from gkd.startup import start
from gkd.trainer import train


def drive(config: Config, inputs: Inputs, session: Session, output: Path, out: Console, started_s: float) -> None:
    """Everything between connecting to Ray and leaving it; ``started_s`` (``time.monotonic``) is when the run began."""
    (output / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config.model_dump())), encoding="utf-8")
    placement = _placed(config, session, output)
    progress = Progress(out, config.trainer.total_steps)
    with progress:
        progress.doing("loading models")
        system = start(config, inputs, placement.groups)
    with progress, JsonLines(output / "metrics.jsonl") as log, JsonLines(output / "samples.jsonl") as sample_file:
        parts = system.parts
        samples = SampleLog(sample_file, config.trainer.n_logged_samples, _decoder(inputs))
        progress.doing("validating")
        before = parts.validation.run()
        teacher = parts.validation.teacher()
        log.write({"step": 0, "epoch": parts.prompts.epoch, **finite(before)})
        progress.say(
            f"before training  {report.line(before)}" + (f"   teacher  {report.line(teacher)}" if teacher else "")
        )
        after = train(config, parts, log, samples, progress)
        parts.actor.save(str(output / "model"))
        if system.teacher is not None:
            system.teacher.close()
    summary = report.Summary(before, after, teacher, config.trainer.total_steps, time.monotonic() - started_s)
    report.write(summary, output)
    report.show(summary, output, _next_command(config, output), out)


def _placed(config: Config, session: Session, output: Path) -> Placement:
    """Place the groups; the table is shown and placement.json written also when the check fails."""
    try:
        placement = place(config, session)
    except PlacementFault as fault:
        print_table(fault.placement.reports)
        fault.placement.write_json(output / "placement.json")
        raise
    print_table(placement.reports)
    placement.write_json(output / "placement.json")
    return placement


def _decoder(inputs: Inputs) -> Callable[[list[int]], str]:
    return lambda ids: inputs.tokenizer.decode(ids, skip_special_tokens=True)


def _next_command(config: Config, output: Path) -> str:
    """What a user would try after this run: the own data after the built-in task, the trained student after that."""
    if not config.uses_builtin_task:
        return f"go on from here: the same command with model.path={output / 'model'}"
    teacher = "teacher.model.path=DIR " if config.algorithm.needs_teacher else ""
    return (
        f"your own models and data: python -m gkd.main +recipe={config.recipe} model.path=DIR {teacher}"
        "data.train_files=[train.jsonl] data.val_files=[test.jsonl] data.prompt_key=question data.answer_key=answer"
    )
