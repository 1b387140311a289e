"""The interpreter of a job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gkd.cli.submit import FIND_PYTHON


@pytest.mark.parametrize("folder", ["venv", "my venv"])
def test_a_job_takes_the_interpreter_that_ray_runs_under(folder: str, tmp_path: Path) -> None:
    """The processes as Ray makes them: a raylet, a worker below it, and the job's shell below that."""
    python = tmp_path / folder / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$0" "$@"\n')
    python.chmod(0o755)
    entrypoint = f'{FIND_PYTHON}; exec "${{python:-true}}" -m gkd.main "a b"'
    worker = "import subprocess, sys; subprocess.run(sys.argv[1], shell=True)"
    raylet = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[2]])"
    flag = f"--python_worker_command={subprocess.list2cmdline([str(python), 'setup_worker.py', '--x=1'])}"
    command = [sys.executable, "-c", raylet, worker, entrypoint, "--raylet_name=x"]
    done = subprocess.run([*command, flag], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == (f"{python} -m gkd.main a b\n", "")
    without = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (without.stdout, without.stderr) == ("", "")
