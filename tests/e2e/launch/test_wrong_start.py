"""Started in the wrong way, or without the packages, programs say in one line what to do instead."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gkd.cli.command import PROGRAMS
from tests.e2e.conftest import ROOT

BARE = (sys.executable, "-S", "-E")  # the interpreter without any installed package
NO_PACKAGE = "./launch/quickstart.sh installs what is needed into .venv"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([*BARE, "-m", "gkd.main", "+recipe=grpo"], NO_PACKAGE),
        ([*BARE, "-m", "gkd.plan", "+recipe=grpo", "model.size=7b"], NO_PACKAGE),
        ([*BARE, "-m", "gkd.teacher.serve", "teacher.model.path=x"], NO_PACKAGE),
        ([*BARE, "-m", "gkd.cli.launch.node", "head"], NO_PACKAGE),
        ([*BARE, "launch/submit.py", "+recipe=grpo"], NO_PACKAGE),
        ([*BARE, "launch/verify_gpus.py"], NO_PACKAGE),
        ([*BARE, "gkd/main.py", "+recipe=grpo"], "python -m gkd.main +recipe=NAME"),
        ([*BARE, "-m", "gkd", "train", "+recipe=grpo"], NO_PACKAGE),
        (
            [*BARE, "-m", "gkd", "+recipe=grpo", "data.train_files=[a b]"],
            "gkd train +recipe=grpo 'data.train_files=[a b]'?",
        ),
        ([*BARE, "-m", "gkd", "trian"], "gkd train?"),
        ([*BARE, "-m", "gkd", "serve_teacher"], "gkd serve-teacher?"),
        ([sys.executable, "-m", "gkd.main"], "gkd train +recipe={"),
        ([sys.executable, "launch/submit.py"], "gkd submit --address http://HOST:8265 +recipe={"),
        ([sys.executable, "-m", "gkd", "submit"], "gkd submit --address http://HOST:8265 +recipe={"),
        ([sys.executable, "-m", "gkd.cli.launch.node", "worker"], "--address"),
        (["sh", "launch/ray_cluster.sh", "worker"], "--address"),
        (["bash", "launch/slurm.sbatch", "+recipe=grpo"], "sbatch launch/slurm.sbatch +recipe=NAME"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_one_line_names_the_right_command(command: list[str], expected: str) -> None:
    here = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    here |= {"GKD_PYTHON": sys.executable}
    done = subprocess.run(command, cwd=ROOT, env=here, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


def test_gkd_alone_names_its_programs() -> None:
    done = subprocess.run([*BARE, "-m", "gkd"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    for name, program in PROGRAMS.items():
        assert re.search(rf"^  gkd {name} .*{program.elsewhere}$", done.stderr, re.MULTILINE)
    helped = subprocess.run(
        [*BARE, "-m", "gkd", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert "python -m gkd.plan" in helped.stdout


@pytest.mark.parametrize(
    ("command", "expected"),
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
def test_help_installs_nothing(command: list[str], expected: str, tmp_path: Path) -> None:
    """In a checkout without .venv, where an installation would be told."""
    for name in ("gkd", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "GKD_"))}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert expected in done.stdout
    assert "installing" not in done.stdout
    assert not (tmp_path / ".venv").exists()


LARGE = ("torch", "ray", "hydra", "vllm", "transformers", "pydantic", "numpy")
HELP = f"""
import sys
from gkd.cli.command import PROGRAMS, main
for name in PROGRAMS:
    try:
        main([name, "--help"])
    except SystemExit as end:
        assert end.code == 0
    loaded = [package for package in {LARGE!r} if package in sys.modules]
    assert not loaded, (name, loaded)
"""


def test_help_of_every_program_loads_nothing_large() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in PROGRAMS:
        assert f"usage: gkd {name} " in done.stdout


def test_the_doctor_works_without_any_package() -> None:
    done = subprocess.run(
        [*BARE, "-m", "gkd.doctor"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stdout.startswith("failed   python")
    assert "./launch/quickstart.sh" in done.stdout
    assert done.stderr == ""
