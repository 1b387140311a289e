"""A whole plan: memory, advice, stages, steps and the best splits, as JSON and as tables of at most 120 columns."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from gkd.config.device import GB
from gkd.config.registry import shorten_name
from gkd.planning.advice.advise import (
    NOT_AHEAD,
    Advice,
    advise,
    advise_all,
    advise_by_memory,
    explain_no_advice,
    with_cache_size,
)
from gkd.planning.advice.changes import LEVEL_NAMES
from gkd.planning.advice.splits import Split, best_splits
from gkd.planning.layout import DEFAULT_GPU, Layout
from gkd.planning.memory.colocation import all_memory, needs_offload, with_micro_batch
from gkd.planning.memory.pools import GroupMemory
from gkd.planning.shapes import ModelShape
from gkd.planning.simulation.run import DriverTimes, Step
from gkd.planning.simulation.stages import Factors, Stages, stages_of
from gkd.planning.simulation.steps import simulate_layout
from gkd.planning.transfer import require_transfer

WIDTH = 120
MAX_STALENESS = "schedule.max_staleness"
STALENESS = (0, 1, 2)
GPU_SIZES_GB = (12.0, 16.0, 24.0, 40.0, 48.0, 80.0, 141.0)


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Holds the whole plan of ``layout``.

    ``all_groups``: overrides after which every group fits, None where all do already or there are none. ``factors``: an
    earlier run's, None without one. ``by_memory``: GB of a GPU, the actor's advice there, whether it fits as it is.
    ``idle``: what was requested and changes nothing (:func:`gkd.config.idle.find_idle`).
    """

    layout: Layout
    memory: list[GroupMemory]
    advice: list[Advice]
    all_groups: str | None
    stages: Stages
    steps: list[Step]
    factors: Factors | None
    splits: list[Split]
    by_memory: list[tuple[float, Advice | None, bool]]
    idle: tuple[str, ...] = ()

    def notes(self) -> list[str]:
        """List what changes nothing, and what was assumed."""
        models, config = self.layout.models, self.layout.config
        shapes = (models.student, models.teacher, models.reward_model, models.reference)
        notes = [*self.idle, *dict.fromkeys(shape.note for shape in shapes if shape is not None and shape.note)]
        if self.factors is None:
            notes.append("times are estimates from operations, bytes and links; --from RUN_DIR takes measured ones")
        else:
            notes += _notes_of_run(self.factors, config.schedule.max_staleness)
        plan = config.plan
        if self.layout.hardware.is_cpu:
            notes.append(
                "planned for this machine's CPU, on which a run here would compute (cluster.simulate_gpus); "
                f"plan.gpu_type={DEFAULT_GPU}, or another, plans a GPU"
            )
        if needs_offload(self.layout):
            engines = ", ".join(config.groups_on_actor_gpus())
            notes.append(
                f"actor and {engines} are offloaded in turn (cluster.offload), and the time of that is not counted; "
                f"so nothing is sampled ahead ({MAX_STALENESS}=0)"
            )
        if plan.nodes is not None and self.layout.nodes is None:
            notes.append(f"plan.nodes={plan.nodes} has no room for these groups; advice is for as many as it takes")
        if plan.response_length is None:
            notes.append("every text is taken to be as long as its limit; plan.prompt_length, plan.response_length")
        if config.algorithm.needs_teacher and config.teacher.server_ip is not None:
            notes.append("the external teacher is taken to keep up")
        return notes

    def json(self) -> dict[str, Any]:
        """Return everything, with bytes and seconds as they are."""
        return {
            "hardware": asdict(self.layout.hardware),
            "workload": asdict(self.layout.workload),
            "memory": [asdict(m) | {"total": m.total, "margin": m.margin, "fits": m.fits} for m in self.memory],
            "advice": [
                asdict(a) | {"overrides": a.overrides(), "level_name": LEVEL_NAMES[a.level]} for a in self.advice
            ],
            "all_groups": self.all_groups,
            "stages": asdict(self.stages),
            "pipeline": [asdict(s) | {"waits": s.waiting_s} for s in self.steps],
            "measured": None if self.factors is None else asdict(self.factors),
            "best": [
                {"gpus": s.gpus, "overrides": s.overrides(), "stages": asdict(s.stages), "step": asdict(s.step)}
                for s in self.splits
            ],
            "by_memory": [
                {"memory_gb": size, "fits": fits, "overrides": None if a is None else a.overrides()}
                for size, a, fits in self.by_memory
            ],
            "notes": self.notes(),
        }


def _notes_of_run(factors: Factors, staleness: int) -> list[str]:
    """List what a run's times leave out, or are only an estimate of."""
    notes = []
    if factors.driver == DriverTimes():
        notes.append("that run's timeline.json has no times of the driver, which are not counted")
    elif factors.staleness is not None and factors.staleness != staleness:
        ran = f"schedule.max_staleness={factors.staleness}"
        notes.append(f"that run had {ran}: what the driver and messages take beside other work may differ here")
    return notes


def plan(layout: Layout, factors: Factors | None, best: int | None, by_memory: bool) -> PlanReport:
    """Plan a layout.

    ``best``: GPUs to split, None for no splits; ``by_memory``: whether to try GPUs of several sizes. Raises ConfigError
    for a ``weights.transfer`` that cannot work in it.
    """
    require_transfer(layout)
    if needs_offload(layout) and layout.config.schedule.max_staleness:
        layout = replace(layout, config=layout.config.with_settings(NOT_AHEAD))
    requested, layout = layout, replace(layout, config=with_micro_batch(layout))
    memory = all_memory(with_cache_size(layout))
    advice = {group.group: list(advise(layout, group.group)) for group in memory}
    scale = factors or Factors()
    ahead = STALENESS[:1] if needs_offload(layout) else STALENESS
    steps = [simulate_layout(layout, staleness, scale) for staleness in ahead]
    stages = replace(scale.apply(stages_of(layout)), generate=steps[0].generate)
    return PlanReport(
        layout=layout,
        memory=memory,
        advice=list(itertools.chain(*advice.values())),
        all_groups=advise_all(layout, advice),
        stages=stages,
        steps=steps,
        factors=factors,
        splits=[] if best is None else best_splits(requested, best, factors=replace(scale, paces=())),
        by_memory=advise_by_memory(requested, GPU_SIZES_GB) if by_memory else [],
    )


def show(report: PlanReport, file: IO[str] | None = None) -> None:
    """Print a whole plan."""
    out = Console(file=file, width=WIDTH, highlight=False, markup=False, emoji=False)
    out.print(_summary(report), soft_wrap=True)
    _print_memory(report, out)
    _print_advice(report, out)
    _print_pipeline(report, out)
    _print_splits(report, out)
    _print_by_memory(report, out)
    for note in report.notes():
        out.print(f"note: {note}", soft_wrap=True)


def _summary(report: PlanReport) -> str:
    layout, workload = report.layout, report.layout.workload
    models = [f"student {_count(layout.models.student)}"]
    if layout.models.teacher is not None:
        models.append(f"teacher {_count(layout.models.teacher)}")
    hardware = layout.hardware
    algorithm = shorten_name(layout.config.algorithm.name)
    unnamed = " (no +recipe is named)" if layout.config.recipe == "none" else ""
    return (
        f"{algorithm}{unnamed}: {', '.join(models)}; {hardware.name} with {hardware.memory / GB:.1f} GB; a step: "
        f"{workload.samples:,} samples of {workload.prompt:,} + {workload.response:,} tokens"
    )


def _count(shape: ModelShape) -> str:
    n = shape.n_parameters
    return f"{n / 1e9:.2f} B" if n >= 1e8 else f"{n / 1e6:.2f} M"


def _table(*columns: str, title: str) -> Table:
    table = Table(box=SIMPLE, pad_edge=False, title=title, title_justify="left", title_style="")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def _print_memory(report: PlanReport, out: Console) -> None:
    """Print one column a group, one row an item."""
    groups = report.memory
    table = _table("", *(f"{g.group}, {g.n_gpus} GPU{'s' * (g.n_gpus != 1)}" for g in groups), title="memory, GB a GPU")
    for name in dict.fromkeys(name for group in groups for name in group.items):
        table.add_row(name, *(_format_gb(g.items[name]) if name in g.items else "" for g in groups))
    table.add_section()
    table.add_row("needed", *(_format_gb(g.total) for g in groups))
    table.add_row("there is", *(_format_gb(max(0.0, g.available)) for g in groups))
    table.add_row("left", *(_format_gb(g.margin) for g in groups))
    table.add_row("fits", *("yes" if g.fits else "NO" for g in groups))
    out.print(table)
    for group in groups:
        for note in filter(None, (group.shortage, *group.notes)):
            out.print(f"{group.group}: {note}", soft_wrap=True)


def _format_gb(n_bytes: float) -> str:
    return f"{n_bytes / GB:.2f}" if abs(n_bytes) < 10 * GB else f"{n_bytes / GB:.1f}"


def _print_advice(report: PlanReport, out: Console) -> None:
    short = [group for group in report.memory if not group.fits]
    without = [group for group in short if group.group not in {a.group for a in report.advice}]
    if report.advice or report.all_groups:
        out.print("\nwhat makes it fit, the mildest first (overrides to paste):")
    mild = {suggestion.group for suggestion in report.advice if suggestion.level == 1}
    for group in dict.fromkeys(suggestion.group for suggestion in report.advice if suggestion.group not in mild):
        out.print(f"  {group}: what only makes it slower is not enough")
    for suggestion in report.advice:
        out.print(f"  {suggestion.group}, level {suggestion.level}, {LEVEL_NAMES[suggestion.level]}:", soft_wrap=True)
        out.print(f"    {suggestion.line(report.layout.hardware.is_cpu)}", soft_wrap=True)
    if report.all_groups is None:
        for memory in without:
            out.print(f"  {memory.group}: {explain_no_advice(report.layout, memory)}", soft_wrap=True)
        if len(short) > 1 and not without:
            out.print("  these do not go together: no changes were found with which all groups fit")
    elif len(short) > 1 or report.all_groups not in [suggestion.overrides() for suggestion in report.advice]:
        out.print(f"  all groups at once:\n    {report.all_groups}", soft_wrap=True)


def _print_pipeline(report: PlanReport, out: Console) -> None:
    stages = report.stages
    parts = [f"generate {stages.generate:.2f}"]
    scoring = {"score": stages.score, "reference": stages.reference, "reward model": stages.reward}
    parts += [f"{name} {seconds:.2f}" for name, seconds in scoring.items() if seconds]
    parts += [f"update {stages.update:.2f}", f"sync {stages.sync:.2f}"]
    source = "estimated" if report.factors is None else "as measured in the earlier run"
    out.print(f"\nseconds of each stage by itself, {source}: {', '.join(parts)}", soft_wrap=True)
    groups = list(report.steps[0].busy)
    table = _table(MAX_STALENESS, "s a step", *(f"{g} waits" for g in groups), "most busy", title="")
    for step in report.steps:
        waits = (f"{step.waiting_s[g]:.2f}" for g in groups)
        table.add_row(str(step.staleness), f"{step.seconds:.2f}", *waits, step.bound)
    out.print(table)


def _print_splits(report: PlanReport, out: Console) -> None:
    if not report.splits:
        return
    a_node = report.layout.config.plan.gpus_per_node
    nodes = f"nodes of {a_node} GPU{'s' * (a_node != 1)}"
    out.print(f"the fastest splits that fit, over {nodes} (overrides to paste):")
    for number, split in enumerate(report.splits, start=1):
        gpus = ", ".join(f"{group} {n}" for group, n in split.gpus.items())
        out.print(f"  {number}. {split.step.seconds:.2f} s a step, {split.step.bound} most busy: {gpus}")
        out.print(f"     {split.overrides()}", soft_wrap=True)


def _print_by_memory(report: PlanReport, out: Console) -> None:
    if not report.by_memory:
        return
    table = _table("GB a GPU", "the actor fits with", title="by memory")
    table.columns[1].justify = "left"
    for size, advice, fits in report.by_memory:
        table.add_row(f"{size:g}", "these settings" if fits else "nothing" if advice is None else advice.overrides())
    out.print(table)
