"""``gkd train --multirun +recipe=grpo actor.lr=1e-5,1e-4 trainer.seed=0,1``: one run for each combination of values.

The runs go one after the other, each in a process and a directory of its own; at the end their validations are in one
table, each run is compared with the first one as ``gkd compare`` does, and their curves are over each other in one
report. Before the first run begins all settings are checked, and that the models and the data of each run are there.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gkd.cli.compare import show_each_score
from gkd.cluster.session.shutdown import defer_signals
from gkd.config import Config, user_path
from gkd.config.loading import names_file
from gkd.config.output_files import METRICS, REPORT
from gkd.config.overrides import literal_override, shell_override
from gkd.driver.output_dir import claim, make_directory, require_no_run, require_writable
from gkd.errors import ConfigError, end_with_parent
from gkd.evaluation.comparison import read_all
from gkd.observability.page.run import read_intervals
from gkd.observability.page.write import write_page
from gkd.observability.progress import console, print_table
from gkd.observability.report import Summary, read
from gkd.observability.run_files import RunFiles

MAX_RUNS = 1_000
MAX_COMPARED = 32
"""Runs that are compared with the first at the end."""
INPUTS = {"model", "teacher", "reference", "reward_model", "data"}
"""Sections that name models and data: runs with the same of these, and the same groups, have the same files."""
SETTINGS = "settings.yaml"
"""Copy of the file of settings that a sweep was given, in its directory."""
MAX_NAME = 200
"""Characters of a run's directory."""


@dataclass(frozen=True, slots=True)
class SweptRun:
    """One run of a sweep: its directory's name, and its overrides without the directory."""

    name: str
    overrides: tuple[str, ...]


def sweep(overrides: Sequence[str], configure: Callable[[Sequence[str]], Config]) -> int:
    """Do all runs; returns the exit code: 2 where one could not begin, else 1 where one has failed, after the others.

    ``configure`` composes and checks the configuration of one.

    Raises ConfigError, before the first run, where one of them could not begin, or one is under way there.
    """
    runs = list(expand(overrides))
    configs = [configure(run.overrides) for run in runs]
    stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    directory = output_of(configs[0], f"sweep_{stamp}")
    for run, config in zip(runs, configs, strict=True):
        require_no_run(directory / run.name, bool(config.trainer.resume))
    _require_files(configs)
    make_directory(directory)
    require_writable(directory)
    out = console()
    codes: dict[Path, int] = {}
    descriptor = claim(directory)  # by which gkd report --watch knows, between two runs, that there are more
    try:
        runs = keep_file(runs, directory)
        for number, (run, config) in enumerate(zip(runs, configs, strict=True), 1):
            out.print(f"\nrun {number} of {len(runs)}: {run.name}", soft_wrap=True)
            codes[directory / run.name] = _run(run, config, directory, descriptor)
        show(codes, out)
    except SystemExit as end:  # a signal
        end.add_note(f"{shell_override('trainer.output_dir', directory)} trainer.resume=true --multirun goes on")
        raise
    finally:
        os.close(descriptor)
    return 2 if 2 in codes.values() else int(any(codes.values()))


def keep_file(runs: Sequence[SweptRun], directory: Path) -> list[SweptRun]:
    """Return runs that have a copy in ``directory`` in place of a file of settings, which may be edited meanwhile."""
    copy = directory / SETTINGS
    files = {override for run in runs for override in run.overrides if names_file(override)}
    for file in files:  # of several, one is refused before
        with contextlib.suppress(shutil.SameFileError):
            shutil.copyfile(user_path(file), copy)
    copies = dict.fromkeys(files, str(copy))
    return [replace(run, overrides=tuple(copies.get(text, text) for text in run.overrides)) for run in runs]


def _require_files(configs: Sequence[Config]) -> None:
    """Raise ConfigError where one of the runs would not find its models or data."""
    from gkd.driver.inputs.find import require_files  # imports what a machine that submits jobs may lack
    from gkd.observability.tracking import require_trackers

    checked: set[tuple[str, bool, bool]] = set()
    for config in configs:
        require_trackers(config)
        inputs = config.model_dump_json(include=INPUTS), config.has_reference_group, config.has_reward_model_group
        if inputs not in checked:
            require_files(config)
        checked.add(inputs)


def expand(overrides: Sequence[str]) -> Iterator[SweptRun]:
    """Yield a run for each combination of the values that overrides list, the last override changing fastest.

    Raises ConfigError where no override lists any, for a file that is no override, for too many runs, and for two of
    one name.
    """
    from hydra.core.override_parser.types import Glob, IntervalSweep
    from omegaconf.errors import OmegaConfBaseException

    from gkd.config.compose import parse_overrides

    choices: list[list[tuple[str, str]]] = []  # of each override: what a run is named for it, and what it is written as
    for override in overrides:
        (parsed,) = parse_overrides([override]) if "=" in override and not names_file(override) else (None,)
        if parsed is None or not parsed.is_sweep_override():
            choices.append([("", override)])
            continue
        if isinstance(parsed.value(), Glob | IntervalSweep):
            raise ConfigError(f"--multirun: {override}: glob() and interval() list no values; name them")
        key = parsed.get_key_element()
        try:
            values = list(parsed.sweep_string_iterator())
        except OmegaConfBaseException:
            raise ConfigError(f"--multirun: {override}: values are listed, or one range() is named") from None
        choices.append([(f"{key.lstrip('+')}={value}", f"{key}={value}") for value in values])
    n = 1
    for several in choices:
        n *= len(several)
    if n == 1:
        raise ConfigError("--multirun: no setting has several values, such as actor.lr=1e-5,1e-4")
    if n > MAX_RUNS:
        raise ConfigError(f"--multirun: {n:,} runs are more than {MAX_RUNS:,}")
    names = set[str]()
    for combination in itertools.product(*choices):
        name = _as_name(",".join(name for name, _ in combination if name))
        if name in names:
            raise ConfigError(f"--multirun: two runs would have the directory {name}: name each value once")
        names.add(name)
        yield SweptRun(name, tuple(text for _, text in combination))


def _as_name(text: str) -> str:
    """Return a text as the name of a directory."""
    plain = "".join(c if c.isalnum() or c in "=.,-_+" else "_" for c in text)
    if len(plain) > MAX_NAME:
        raise ConfigError(f"--multirun: a run's name would have {len(plain)} characters: {plain[:60]}...")
    return plain


def output_of(config: Config, name: str) -> Path:
    """Return where a sweep, or a job, writes: what is set, or a directory of this name."""
    return user_path(config.trainer.output_dir or f"outputs/{config.recipe}/{name}").absolute()


def _run(run: SweptRun, config: Config, directory: Path, descriptor: int) -> int:
    """Do one run in a process of its own; returns its exit code. A signal that ends this program ends the run first.

    Where this program is killed, the run ends as by SIGTERM. Until it has, it holds ``descriptor``, the directory's.
    """
    path = directory / run.name
    further = [literal_override("trainer.output_dir", path)]
    if config.trainer.resume:  # what an interrupted sweep has not begun, or saved nothing of, has nothing to go on with
        further.append("trainer.resume=auto")
    if config.trainer.run_group is None:
        further.append(literal_override("trainer.run_group", directory.name))
    command = [sys.executable, "-m", "gkd.main", *run.overrides, *further]
    ends = partial(end_with_parent, signal.SIGTERM)
    process: subprocess.Popen[bytes] | None = None
    try:
        with defer_signals():
            process = subprocess.Popen(command, pass_fds=[descriptor], preexec_fn=ends)  # noqa: PLW1509 takes no lock
        return process.wait()
    except BaseException:
        if process is not None:
            process.terminate()
            process.wait()
        raise


def show(codes: Mapping[Path, int], out: Console) -> None:
    """Print the last validation of each run in one table, compare the runs, and write one report of all.

    ``codes``: the exit code of each, by its directory.
    """
    summaries = {run: read(run) for run, code in codes.items() if code == 0}
    names = list(dict.fromkeys(name for summary in summaries.values() for name in summary.after))
    table = Table(box=None, pad_edge=False)
    for number, title in enumerate(["run", *names, "seconds"]):
        table.add_column(title, justify="right" if number else "left", no_wrap=not number)
    for run, code in codes.items():
        if (summary := summaries.get(run)) is None:
            table.add_row(run.name, *([""] * len(names)), f"failed, exit code {code}")
        else:
            table.add_row(run.name, *(_with_interval(summary, name) for name in names), f"{summary.wall_s:.0f}")
    out.print()
    print_table(out, table)
    _compare(list(summaries), out)
    if begun := [RunFiles(run) for run in codes if (run / METRICS).exists()]:
        page = begun[0].path.parent / REPORT
        write_page(begun, page)
        out.print(f"\nall runs over each other: {page}", soft_wrap=True)


def _with_interval(summary: Summary, name: str) -> str:
    """Return a figure of validation, of shares of right answers with the 95 % interval; empty for none."""
    value = summary.after.get(name)
    if value is None:
        return ""
    interval = read_intervals(summary).get(name, {}).get("after")
    return f"{value:.4f}" + (f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else "")


def _compare(runs: Sequence[Path], out: Console) -> None:
    """Compare every run with the first one, question by question, where they have a score in common."""
    try:
        results = read_all([run for run in runs if (run / "results").is_dir()][:MAX_COMPARED])
    except ConfigError as error:  # the runs are done, whether they can be compared or not
        out.print(f"\nthe runs are not compared: {error}", soft_wrap=True)
        return
    show_each_score(results, out)
