"""Submit a run to a Ray cluster as a job, follow it, stop it.

    gkd submit --address http://HOST:8265 --follow +recipe=grpo trainer.total_steps=50
    gkd submit --address http://HOST:8265 --multirun --follow +recipe=grpo actor.lr=1e-5,1e-4   # a job for each
    gkd submit --address http://HOST:8265 --status [JOB]
    gkd submit --address http://HOST:8265 --attach JOB      # follow a job that runs already
    gkd submit --address http://HOST:8265 --stop JOB

The directory it is started in goes with the job, without names that begin with a dot, virtual environments, linked
directories, and outputs, data, build, dist, runs and wandb at its top; what is left out is printed. Paths are made
absolute, so models, data and the output directory are to be where every machine sees them. The address may be left out
where launch/ray_cluster.sh started the head. With --follow, and for --attach, the exit code is the job's
own; Ctrl-C stops following, not the job. Runs of --multirun wait for GPUs of each other, and with --follow their
validations are in one table at the end. Otherwise: 0 done, 1 failed, 2 what was requested cannot be.
"""

from __future__ import annotations

import argparse
import datetime
import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gkd.errors import ConfigError, Parser, entry_point

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

    from gkd.cli.launch.jobs import Jobs
    from gkd.config import Config


# A job's shell is a child of a worker of Ray's, and that one of the raylet, whose command line names the interpreter
# that Ray runs its workers with. The one that PATH has may be another, without any of the packages.
FIND_PYTHON = (
    "raylet=$(sed -n 's/^PPid:[[:space:]]*//p' /proc/$PPID/status 2>/dev/null); "
    """python=$(tr '\\0' '\\n' 2>/dev/null </proc/$raylet/cmdline | sed -n -e """
    """'s/^--python_worker_command="\\([^"]*\\)".*/\\1/p' -e 's/^--python_worker_command=\\([^" ]*\\) .*/\\1/p')"""
)


WAITS_S = 86_400
"""Seconds that a run of a sweep waits for GPUs of the others, unless ``cluster.reserve_timeout_s`` is given."""


@dataclass(frozen=True, slots=True)
class JobRun:
    """One run to submit: the job's name, where it writes, and its settings."""

    name: str
    output: Path
    overrides: Sequence[str]
    config: Config


@entry_point
def main(arguments: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    options = _parser().parse_intermixed_args(arguments)
    from gkd.cli.launch.jobs import Jobs
    from gkd.cli.train import require_recipe

    actions = [name for name in ("status", "attach", "stop") if getattr(options, name) is not None]
    if len(actions) > 1 or (actions and (options.overrides or options.follow)):
        raise ConfigError("--status, --attach, --stop and a run to submit exclude each other")
    if any(getattr(options, name) == "" for name in ("attach", "stop")):
        raise ConfigError(f"--{actions[0]} needs the name of a job; --status lists them")
    if actions and options.multirun:
        raise ConfigError(f"--multirun is for runs to submit, not for --{actions[0]}")
    runs = [] if actions else _runs(options.overrides, options.multirun)
    for run in runs:
        require_recipe(run.config, "gkd submit --address http://HOST:8265")
    jobs = Jobs(_address(options.address))
    if options.status is not None:
        return _status(jobs, options.status)
    if options.attach is not None:
        return _follow(jobs, options.attach)
    if options.stop is not None:
        return _stop(jobs, options.stop)
    return _submit(jobs, runs, options.follow)


def _parser() -> argparse.ArgumentParser:
    parser = Parser("gkd submit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", metavar="http://HOST:8265", help="the dashboard of the cluster's head")
    parser.add_argument("--follow", action="store_true", help="print the job's log and end with its exit code")
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="a job for each combination of values: actor.lr=1e-5,1e-4"
    )
    parser.add_argument("--status", nargs="?", const="", metavar="JOB", help="how a job, or every job, is")
    parser.add_argument("--attach", metavar="JOB", help="follow a job that was submitted before")
    parser.add_argument("--stop", metavar="JOB", help="end a job")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as for gkd train")
    return parser


def _address(option: str | None) -> str:
    from gkd.cluster.session import local

    address = option or os.environ.get("RAY_API_SERVER_ADDRESS") or local.dashboard()
    if not address:
        raise ConfigError(
            "no --address, and launch/ray_cluster.sh started no head here: --address http://HOST:8265 names the "
            "dashboard of a cluster"
        )
    return address


def _runs(overrides: Sequence[str], multirun: bool) -> list[JobRun]:
    """Return what is to be submitted, checked. Raises ConfigError where one run could not begin."""
    from gkd.cli.sweep import expand, output_of
    from gkd.config.cluster import Cluster
    from gkd.config.compose import compose
    from gkd.config.overrides import literal_override

    stamp = f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(2)}"
    if not multirun:
        config = compose(overrides)
        name = f"{config.recipe}-{stamp}"
        return [JobRun(name, output_of(config, name), overrides, config)]
    expanded = list(expand(overrides))
    configs = [compose(run.overrides) for run in expanded]
    directory = output_of(configs[0], f"sweep_{stamp}")  # of all, whatever their recipes
    runs = []
    for number, (run, config) in enumerate(zip(expanded, configs, strict=True), 1):
        further = []
        if config.trainer.run_group is None:
            further.append(literal_override("trainer.run_group", directory.name))
        named = any(override.startswith("cluster.reserve_timeout_s=") for override in overrides)
        if not named and config.cluster.reserve_timeout_s == Cluster.model_fields["reserve_timeout_s"].default:
            further.append(f"cluster.reserve_timeout_s={WAITS_S}")  # for the GPUs of the others
        runs.append(
            JobRun(f"{config.recipe}-{stamp}-{number}", directory / run.name, (*run.overrides, *further), config)
        )
    return runs


def _submit(jobs: Jobs, runs: Sequence[JobRun], follow: bool) -> int:
    from gkd.cli.launch.package import pack
    from gkd.cli.launch.paths import resolve_paths, settings_file

    working_dir = Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        package = Path(directory) / "working_dir.zip"
        commands, further = [], dict[Path, Path]()
        for run in runs:
            overrides, file = settings_file(run.overrides, working_dir)
            commands.append(["-m", "gkd.main", *overrides, *resolve_paths(run.config, working_dir, run.output)])
            further |= file
        n_files, left_out = pack(working_dir, package, further)
        without = f", without {', '.join(left_out)}" if left_out else ""
        print(f"packed {n_files} files of {working_dir}, {package.stat().st_size / 1e6:.1f} MB{without}", flush=True)
        for run, command in zip(runs, commands, strict=True):
            jobs.submit(
                run.name, f'{FIND_PYTHON}; exec "${{python:-python}}" {shlex.join(command)}', package, run.output
            )
            print(f"submitted {run.name} to {jobs.address}")
            print(f"it writes to {run.output}, as the cluster's head sees it", flush=True)
    if follow:
        codes = [_follow(jobs, run.name) for run in runs]
        if len(runs) > 1:
            _show(runs, codes)
        return codes[0] if len(codes) == 1 else int(any(codes))
    for run in runs:
        for option in ("attach", "stop"):
            print(f"gkd submit --address {jobs.address} --{option} {run.name}")
    return 0


def _show(runs: Sequence[JobRun], codes: Sequence[int]) -> None:
    """Print what the runs of a sweep came to, where their directory is to be seen from here."""
    from gkd.cli.sweep import show
    from gkd.config.output_files import SUMMARY
    from gkd.observability.progress import console

    ends = {run.output: code for run, code in zip(runs, codes, strict=True)}
    visible = {run for run in ends if (run / SUMMARY).exists()}
    if visible:
        show({run: code if code or run in visible else -1 for run, code in ends.items()}, console())
    else:
        print(f"the runs are in {runs[0].output.parent}, as the cluster's head sees it")


def _follow(jobs: Jobs, name: str) -> int:
    from gkd.cli.launch.jobs import exit_code

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        job = jobs.follow(name, write)
    except KeyboardInterrupt:
        print(f"\n{name} goes on; to end it: gkd submit --address {jobs.address} --stop {name}")
        raise
    code = exit_code(job)
    print(f"{name}: {_line(job)}", file=sys.stderr if code else sys.stdout)
    return code


def _status(jobs: Jobs, name: str) -> int:
    records = [jobs.info(name)] if name else jobs.list()
    if not records:
        print(f"no jobs on {jobs.address}")
    for job in records:
        print(f"{job.submission_id}  {_line(job)}  {(job.metadata or {}).get('output_dir', '')}")
    return 0


def _stop(jobs: Jobs, name: str) -> int:
    if (job := jobs.info(name)).status.is_terminal():
        print(f"{name} had ended already: {_line(job)}")
        return 0
    print(f"stopping {name}, which may write a last checkpoint", file=sys.stderr)
    job = jobs.stop(name)
    print(f"stopped {name}" if job.status == "STOPPED" else f"{name} ended before it was stopped: {_line(job)}")
    return 0


def _line(job: JobDetails) -> str:
    """Return ``FAILED with exit code 2`` or ``RUNNING``."""
    if job.status != "FAILED":
        return str(job.status.value)
    if job.driver_exit_code is None:
        return f"FAILED{'' if job.driver_node_id else ' before it started'}: {' '.join(str(job.message).split())[:300]}"
    return f"FAILED with exit code {job.driver_exit_code}"
