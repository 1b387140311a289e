"""``gkd monitor [RUN_DIR] [--every SECONDS]``: show how a run does, and the memory of this machine's GPUs.

How far it is, curves of its metrics, the stages of its last step, what its engines have to do, its last warnings and a
sample. For each GPU: name,
compute capability, total memory, what the run's groups on it have allocated and reserved, what is free, how often their
allocators had to start over or gave up, and advice; without a GPU the memory of the run's processes by group. What the
groups hold is what they reported at the run's last step. On a terminal it goes on, every two seconds, until the run
ends or Ctrl-C; elsewhere, and with --once, it prints once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from gkd.errors import ConfigError, Parser, RunFailed, entry_point

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from gkd.cluster.gpu import Gpu
    from gkd.observability.run_files import RunFiles

LIVE_EVERY_S = 2.0
RECENT = 20
"""Steps by whose mean the time that the others take is estimated."""
FULL = 0.95  # share of a GPU's memory beyond which there is advice
FIGURES = ("allocated_gb", "reserved_gb", "peak_gb", "alloc_retries", "ooms")


@entry_point
def main(arguments: Sequence[str]) -> int:
    """Print once, or again and again; returns the exit code."""
    parser = Parser("gkd monitor", description=__doc__)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN_DIR", help="output directory of a run")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="show again and again, until Ctrl-C")
    parser.add_argument("--once", action="store_true", help="print once, on a terminal too")
    options = parser.parse_args(arguments)
    if options.every is not None and not 0 < options.every <= 86_400:
        raise ConfigError(f"--every {options.every:g}: a number of seconds above 0 and at most 86400 is expected")
    from gkd.observability.progress import console, rewrites
    from gkd.observability.run_files import RunFiles

    run = None if options.run is None else RunFiles(options.run)
    out = console()
    live = rewrites(out)
    every = options.every or (LIVE_EVERY_S if live and run is not None else None)
    if options.once or every is None or (run is not None and run.has_ended):
        out.print(view(run))
    elif live:
        _follow(run, every, out)
    else:
        _print_again(run, every, out)
    return 0


def _follow(run: RunFiles | None, every: float, out: Console) -> None:
    from rich.live import Live

    # On a screen of its own, so that a view which is higher than the window leaves no copies of itself behind.
    with Live(view(run), console=out, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
        while run is None or not run.has_ended:
            time.sleep(every)
            live.update(view(run), refresh=True)
    out.print(view(run))


def _print_again(run: RunFiles | None, every: float, out: Console) -> None:
    """Print the whole view again and again, where lines cannot be rewritten."""
    ended = False
    while not ended:
        ended = run is not None and run.has_ended  # before the view, so that the last one is of the end
        out.print(view(run))
        if not ended:
            time.sleep(every)
            out.print()


def view(run: RunFiles | None) -> RenderableType:
    """Lay out everything there is to show now."""
    from rich.console import Group

    from gkd.cluster.gpu import read_gpus
    from gkd.observability import live

    parts: list[RenderableType] = [] if run is None else [progress_line(run), ""]
    try:
        present = read_gpus()
        parts.append(_gpus(present, run) if present else "this machine has no GPU")
    except RunFailed as error:  # a GPU is lost: the run is all the more worth a look
        present = []
        parts.append(str(error))
    if run is not None:
        if not present:
            parts.append(_processes(run))
        parts += live.view(run)
    return Group(*parts)


def _gpus(present: Sequence[Gpu], run: RunFiles | None) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("GPU", "name", "capability", "total_gb", "free_gb", "group", *FIGURES, "advice"):
        table.add_column(title.replace("_gb", " GB"), justify="right" if title in FIGURES else "left", no_wrap=True)
    last = {} if run is None else run.last_metrics
    for gpu in present:
        groups = [] if run is None else run.groups_on(gpu.uuid)
        reported = [{figure: last.get(f"memory/{group}/{figure}") for figure in FIGURES} for group in groups]
        memory = [f"{_gb(size):.1f}" for size in (gpu.total, gpu.free)] if gpu.total else ["", ""]
        row = [str(gpu.index), gpu.name, gpu.capability, *memory, ", ".join(groups)]
        for figure in FIGURES:
            cells = [value for report in reported if (value := report[figure]) is not None]
            row.append(f"{sum(cells):.1f}" if cells and figure.endswith("_gb") else f"{sum(cells):g}" if cells else "")
        table.add_row(*row, advice(gpu, groups, last, run))
    return table


def advice(gpu: Gpu, groups: Sequence[str], last: Mapping[str, float], run: RunFiles | None) -> str:
    """Name what to change on a GPU that is short of memory; empty where it is not."""
    if any(last.get(f"memory/{group}/ooms", 0) for group in groups) and "actor" in groups:
        return f"memory ran out{_actor_advice(run)}"
    if any(last.get(f"memory/{group}/alloc_retries", 0) for group in groups):
        config = None if run is None else run.read_config()
        if config is None or config.weights.transfer_class.expandable_segments:
            return "the allocator had to start over: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        return f"the allocator had to start over{_actor_advice(run) if 'actor' in groups else ''}"
    if gpu.free < (1 - FULL) * gpu.total:
        engines = [group for group in groups if group in ("rollout", "teacher", "reference")]
        return f"nearly full: lower {engines[0]}.gpu_memory_utilization" if engines else "nearly full"
    return ""


def _actor_advice(run: RunFiles | None) -> str:
    """Return the cheapest changes that a plan tries for the actor's memory; empty where the settings are not known."""
    from gkd.planning.advice.changes import actor_overrides

    config = None if run is None else run.read_config()
    if config is None:
        return ""
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    cheapest = next(iter(actor_overrides(config, longest).values()), "")
    return f": {cheapest}" if cheapest else ""


def _processes(run: RunFiles) -> Table:
    import psutil
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("group", "processes here", "memory", "largest at the last step"):
        table.add_column(title, justify="left" if title == "group" else "right")
    last, sizes = run.last_metrics, Counter(row["group"] for row in run.placement())
    for group, pids in run.pids().items():
        held = [gb for pid in pids if (gb := read_resident_gb(pid)) is not None]
        largest = last.get(f"memory/{group}/process_gb")
        shown = f"{sum(held):.2f} GB" if held else "ended" if pids else "elsewhere"
        table.add_row(group, f"{len(held)} of {sizes[group]}", shown, "" if largest is None else f"{largest:.2f} GB")
    table.add_row("", "", f"{_gb(psutil.virtual_memory().available):.2f} GB free", "")
    return table


def progress_line(run: RunFiles) -> str:
    """Format step, time left, and the figures a user looks at."""
    from gkd.observability.progress import clock

    last = run.last_metrics
    step = int(last.get("step", 0))
    if run.is_finished:
        goes_on = "" if run.has_ended else "; starting again, or writing its last files"
        return f"{run.path}: finished, {step} step{'s' * (step != 1)}{goes_on}"
    if (failure := run.failure) is not None:
        return f"{run.path}: step {step}/{run.total_steps}  {failure}"
    if run.was_killed:
        return f"{run.path}: step {step}/{run.total_steps}  killed"
    parts = [f"{run.path}: step {step}/{run.total_steps}"]
    if "timing_s/step" in last:
        seconds = [row["timing_s/step"] for row in run.rows[-RECENT:] if "timing_s/step" in row]
        each = fmean(seconds[1:] or seconds)  # a first step warms caches up and is no measure of the others
        parts += [f"{last['timing_s/step']:.2f} s/step", f"{clock(each * (run.total_steps - step))} left"]
    shown = (
        "reward/mean", "distill/loss", "actor/cross_entropy", "val/accuracy", "val/reverse_kl", "val/loss",
        "response/clip_ratio",
    )  # fmt: skip
    parts += [f"{name} {last[name]:.4g}" for name in shown if name in last]
    return "  ".join(parts)


def read_resident_gb(pid: int) -> float | None:
    """Return memory of a process and its children on this machine; None where it has ended."""
    import psutil

    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return _gb(sum(member.memory_info().rss for member in family))
    except psutil.NoSuchProcess:
        return None


def _gb(n_bytes: float) -> float:
    from gkd.config.device import GB

    return n_bytes / GB
