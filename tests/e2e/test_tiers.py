"""The processes that run the tests, see tests/conftest.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

FILES = {
    "conftest.py": "from tests.conftest import pytest_xdist_make_scheduler",
    "test_a.py": "def test_one(): pass\ndef test_two(): pass",
    "test_b.py": "import os, time\ndef test_one(): pass\ndef test_dies(): time.sleep(2), os._exit(1){after}",
    "test_c.py": "def test_one(): pass",
}


@pytest.mark.parametrize("after", ["", "\ndef test_three(): pass"])
def test_a_process_that_dies_in_a_test_fails_that_test_and_all_others_are_run(
    after: str, tmp_path: Path, variables: dict[str, str]
) -> None:
    """Also one that is all that is left for a process."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text.format(after=after))
    command = ["pytest", "-n", "2", "--dist", "loadscope", "-p", "no:anyio", "-p", "no:hydra_pytest"]
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, env=variables | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert f"1 failed, {5 if after else 4} passed" in done.stdout
    assert "test_b.py::test_dies" in done.stdout
