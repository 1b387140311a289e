"""``gkd report RUN [RUN ...]``: write ``report.html``, one page of a run's files, or of several runs over each other.

A sweep's directory stands for its runs that have a step to show; the others are named.

The page opens from the disk, without a server or a network. A run writes its own when it ends; ``--watch`` writes it
again and again while the run goes on, and the page loads itself again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gkd.errors import ConfigError, Parser, entry_point

if TYPE_CHECKING:
    from gkd.observability.run_files import RunFiles


@entry_point
def main(arguments: Sequence[str]) -> int:
    """Write the page once, or again and again; returns the exit code."""
    parser = Parser("gkd report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output directory of a run or a sweep")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="the page, or the directory of report.html; the first RUN"
    )
    parser.add_argument("--watch", action="store_true", help="write it again until all runs have ended, or Ctrl-C")
    parser.add_argument("--every", type=float, default=10.0, metavar="SECONDS", help="with --watch: how often (10)")
    options = parser.parse_args(arguments)
    if not 0 < options.every <= 86_400:
        raise ConfigError(f"--every {options.every:g}: a number of seconds above 0 and at most 86400 is expected")
    from gkd.config.output_files import REPORT
    from gkd.durable import is_held
    from gkd.observability.page.write import write_page

    runs = _find(options.runs, {})
    file: Path = options.output or options.runs[0]
    if file.is_dir():
        file /= REPORT
    while options.watch and (any(map(is_held, options.runs)) or not all(run.has_ended for run in runs.values())):
        if begun := [run for run in runs.values() if run.rows]:
            write_page(begun, file, options.every)
            print(f"\r{file}: step {max(run.step for run in begun)}", end="", flush=True)
        time.sleep(options.every)
        runs = _find(options.runs, runs)
    begun = [run for run in runs.values() if run.rows]
    why = "there is no step to show yet (metrics.jsonl is empty or missing)"
    if not begun:
        raise ConfigError(f"{next(iter(runs))}: {why}")
    write_page(begun, file)
    print(f"\r{file}" if options.watch else file)
    for path in runs:
        if runs[path] not in begun:
            print(f"{path} is left out: {why}")
    return 0


def _find(directories: Sequence[Path], runs: Mapping[Path, RunFiles]) -> dict[Path, RunFiles]:
    """Return the runs that there are now by their directories, with what was read of those that are in ``runs``."""
    from gkd.observability.run_files import RunFiles, find_runs

    return {path: runs.get(path) or RunFiles(path) for each in directories for path in find_runs(each)}
