"""``gkd report RUN [RUN ...]``: write ``report.html``, one page of a run's files, or of several runs over each other.

A sweep's directory stands for its runs.

The page opens from the disk, without a server or a network. A run writes its own when it ends; ``--watch`` writes it
again and again while the run goes on, and the page loads itself again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from gkd.errors import ConfigError, Parser, entry_point


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
        raise ConfigError(f"--every {options.every:g}: a number of seconds above 0 is expected")
    from gkd.config.output_files import REPORT
    from gkd.observability.page.write import write_page
    from gkd.observability.run_files import RunFiles, find_runs

    runs = [RunFiles(path) for path in dict.fromkeys(run for named in options.runs for run in find_runs(named))]
    file: Path = options.output or options.runs[0]
    if file.is_dir():
        file /= REPORT
    while options.watch and not all(run.has_ended for run in runs):
        if all(run.rows for run in runs):
            write_page(runs, file, options.every)
            print(f"\r{file}: step {max(run.step for run in runs)}", end="", flush=True)
        time.sleep(options.every)
    for run in runs:
        if not run.rows:
            raise ConfigError(f"{run.path}: there is no step to show yet (metrics.jsonl is empty or missing)")
    write_page(runs, file)
    print(f"\r{file}" if options.watch else file)
    return 0
