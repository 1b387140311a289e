"""A plan for people: plain tables of at most 120 columns."""

from __future__ import annotations

from typing import IO

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from gkd.config import settings
from gkd.planning.advice import LEVEL_NAMES, hopeless
from gkd.planning.items import GB, GroupMemory
from gkd.planning.result import Result
from gkd.planning.shape import ModelShape

WIDTH = 120
STALENESS = "schedule.max_staleness"


def show(result: Result, file: IO[str] | None = None) -> None:
    """Print everything a plan found."""
    out = Console(file=file, width=WIDTH, highlight=False, markup=False)
    out.print(_head(result), soft_wrap=True)
    _memory(result, out)
    _advice(result, out)
    _pipeline(result, out)
    _splits(result, out)
    _cards(result, out)
    for note in result.notes():
        out.print(f"note: {note}", soft_wrap=True)


def _head(result: Result) -> str:
    subject, work = result.subject, result.subject.work()
    models = [f"student {_params(subject.models.student)}"]
    if subject.models.teacher is not None:
        models.append(f"teacher {_params(subject.models.teacher)}")
    card = subject.card
    return (
        f"{', '.join(models)}; {card.name} with {card.memory / GB:.1f} GB; a step: {work.samples:,} samples of "
        f"{work.prompt:,} + {work.response:,} tokens"
    )


def _params(shape: ModelShape) -> str:
    n = shape.n_parameters
    return f"{n / 1e9:.2f} B" if n >= 1e8 else f"{n / 1e6:.2f} M"


def _table(*columns: str, title: str) -> Table:
    table = Table(box=SIMPLE, pad_edge=False, title=title, title_justify="left", title_style="")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def _memory(result: Result, out: Console) -> None:
    """One column a group, one row an item."""
    groups = result.memory
    table = _table("", *(f"{g.group}, {g.n_gpus} GPU{'s' * (g.n_gpus != 1)}" for g in groups), title="memory, GB a GPU")
    for name in dict.fromkeys(name for group in groups for name in group.items):
        table.add_row(name, *(_gb(g.items[name]) if name in g.items else "" for g in groups))
    table.add_section()
    table.add_row("needed", *(_gb(g.total) for g in groups))
    table.add_row("there is", *(_gb(g.available) for g in groups))
    table.add_row("left", *(_gb(g.margin) for g in groups))
    table.add_row("fits", *("yes" if g.fits else "NO" for g in groups))
    out.print(table)
    for group in groups:
        for note in _notes(group):
            out.print(f"{group.group}: {note}", soft_wrap=True)


def _notes(group: GroupMemory) -> list[str]:
    return [*([group.lack] if group.lack else []), *group.notes]


def _gb(n_bytes: float) -> str:
    return f"{n_bytes / GB:.2f}" if abs(n_bytes) < 10 * GB else f"{n_bytes / GB:.1f}"


def _advice(result: Result, out: Console) -> None:
    short = [group for group in result.memory if not group.fits]
    without = [group for group in short if group.group not in {a.group for a in result.advice}]
    if result.advice or result.together:
        out.print("\nwhat makes it fit, the mildest first (overrides to paste):")
    mild = {one.group for one in result.advice if one.level == 1}
    for group in dict.fromkeys(one.group for one in result.advice if one.group not in mild):
        out.print(f"  {group}: what only makes it slower is not enough")
    for one in result.advice:
        out.print(f"  {one.group}, level {one.level}, {LEVEL_NAMES[one.level]}:", soft_wrap=True)
        out.print(f"    {one.line()}", soft_wrap=True)
    if result.together is None:
        for memory in without:
            out.print(f"  {memory.group}: {hopeless(result.subject, memory)}", soft_wrap=True)
        if len(short) > 1 and not without:
            out.print("  these do not go together: no changes were found with which all groups fit")
    elif len(short) > 1 or result.together not in [one.overrides() for one in result.advice]:
        out.print(f"  all groups at once:\n    {result.together}", soft_wrap=True)


def _pipeline(result: Result, out: Console) -> None:
    stages = result.stages
    parts = [f"generate {stages.generate:.2f}"]
    judged = {"score": stages.score, "reference": stages.reference, "reward model": stages.reward}
    parts += [f"{name} {seconds:.2f}" for name, seconds in judged.items() if seconds]
    parts += [f"update {stages.update:.2f}", f"sync {stages.sync:.2f}"]
    source = "estimated" if result.factors is None else "as measured in the earlier run"
    out.print(f"\nseconds of each stage by itself, {source}: {', '.join(parts)}", soft_wrap=True)
    groups = list(result.steps[0].busy)
    # Steps that overlap are shown where a run can be told to make them.
    may_overlap = STALENESS in settings()
    table = _table(
        *([STALENESS] if may_overlap else []), "s a step", *(f"{g} waits" for g in groups), "most busy", title=""
    )
    for step in result.steps if may_overlap else result.steps[:1]:
        waits = (f"{step.waits[g]:.2f}" for g in groups)
        table.add_row(*([str(step.staleness)] if may_overlap else []), f"{step.seconds:.2f}", *waits, step.bound)
    out.print(table)


def _splits(result: Result, out: Console) -> None:
    if not result.splits:
        return
    a_node = result.subject.config.plan.gpus_per_node
    nodes = f"nodes of {a_node} GPU{'s' * (a_node != 1)}"
    out.print(f"the fastest splits that fit, over {nodes} (overrides to paste):")
    for number, split in enumerate(result.splits, start=1):
        gpus = ", ".join(f"{group} {n}" for group, n in split.gpus.items())
        out.print(f"  {number}. {split.step.seconds:.2f} s a step, {split.step.bound} most busy: {gpus}")
        out.print(f"     {split.overrides()}", soft_wrap=True)


def _cards(result: Result, out: Console) -> None:
    if not result.cards:
        return
    table = _table("GB a GPU", "the actor fits with", title="by memory")
    table.columns[1].justify = "left"
    for size, found, fits in result.cards:
        table.add_row(f"{size:g}", "these settings" if fits else "nothing" if found is None else found.overrides())
    out.print(table)
