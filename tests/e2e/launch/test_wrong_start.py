"""Started in the wrong way, or without the packages, programs say in one line what to do instead."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

BARE = (sys.executable, "-S", "-E")  # the interpreter without any installed package
NO_PACKAGE = "./launch/quickstart.sh installs what is needed into .venv"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([*BARE, "-m", "gkd.main", "+recipe=grpo"], NO_PACKAGE),
        ([*BARE, "-m", "gkd.teacher.serve", "teacher.model.path=x"], NO_PACKAGE),
        ([*BARE, "-m", "gkd.launch.node", "head"], NO_PACKAGE),
        ([*BARE, "launch/submit.py", "+recipe=grpo"], NO_PACKAGE),
        ([*BARE, "launch/verify_gpus.py"], NO_PACKAGE),
        ([*BARE, "gkd/main.py", "+recipe=grpo"], "python -m gkd.main +recipe=NAME"),
        (
            [*BARE, "-m", "gkd", "+recipe=grpo", "data.train_files=[a b]"],
            "-m gkd.main +recipe=grpo 'data.train_files=[a b]'",
        ),
        ([sys.executable, "-m", "gkd.main"], "name a recipe: python -m gkd.main +recipe={"),
        ([sys.executable, "launch/submit.py"], "name a recipe: python launch/submit.py"),
        ([sys.executable, "-m", "gkd.launch.submit"], "name a recipe: python launch/submit.py"),
        ([sys.executable, "-m", "gkd.launch.node", "worker"], "--address"),
        (["sh", "launch/ray_cluster.sh", "worker"], "--address"),
        (["bash", "launch/slurm.sbatch", "+recipe=grpo"], "sbatch launch/slurm.sbatch +recipe=NAME"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_one_line_names_the_right_command(command: list[str], said: str) -> None:
    here = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    here |= {"GKD_PYTHON": sys.executable}
    done = subprocess.run(command, cwd=ROOT, env=here, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def programs() -> set[str]:
    """Modules of gkd that read a command line of users."""
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "gkd").rglob("*.py")]
    return {name for text in texts for name in re.findall(r'Parser\(\s*"python -m (gkd[\w.]*)"', text)}


def test_gkd_alone_names_its_programs() -> None:
    done = subprocess.run([*BARE, "-m", "gkd"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert {"gkd.main", "gkd.plan", "gkd.doctor", "gkd.monitor", "gkd.teacher.serve"} <= programs()
    for program in programs():
        assert f"  python -m {program} " in done.stderr
    asked = subprocess.run(
        [*BARE, "-m", "gkd", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert "python -m gkd.plan" in asked.stdout


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([*BARE, "-m", "gkd.teacher.serve", "--help"], "teacher.model.path=DIR"),
        ([*BARE, "-m", "gkd.main", "-h"], "+recipe"),
        (["sh", "launch/quickstart.sh", "--help"], "./launch/quickstart.sh [OVERRIDES]"),
        (["bash", "launch/test.sh", "-h"], "./launch/test.sh [PYTEST ARGUMENTS]"),
        (["bash", "launch/ray_cluster.sh", "--help"], "./launch/ray_cluster.sh head"),
        (["bash", "launch/ray_cluster.sh", "head", "--help"], "--dashboard-port PORT"),
        (["bash", "launch/slurm.sbatch", "--help"], "sbatch launch/slurm.sbatch +recipe"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_help_installs_nothing(command: list[str], said: str, tmp_path: Path) -> None:
    """In a checkout without .venv, where an installation would be told."""
    for name in ("gkd", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "GKD_"))}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert said in done.stdout
    assert "installing" not in done.stdout
    assert not (tmp_path / ".venv").exists()


def test_the_doctor_works_without_any_package() -> None:
    done = subprocess.run(
        [*BARE, "-m", "gkd.doctor"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stdout.startswith("failed   python")
    assert "./launch/quickstart.sh" in done.stdout
    assert done.stderr == ""
