"""The planner as a program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_it_answers_at_once_and_loads_no_torch(model: str) -> None:
    program = (
        "import sys; from gkd.cli.plan import main; code = main(sys.argv[1:]);"
        "bad = {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules); sys.exit(f'{bad} loaded' if bad else code)"
    )
    arguments = ["+recipe=grpo", f"model.path={model}", "placement=8gpu", "--best", "4096"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.split("note:")[0].splitlines())) <= 200
    assert "student 1.54 B" in done.stdout


@pytest.mark.parametrize("module", ["gkd.config", "gkd.planning.advice.report", "gkd.cluster.layout.assignment"])
def test_importing_loads_neither_torch_nor_ray_nor_hydra(module: str) -> None:
    program = f"import sys, {module}; sys.exit(str({{'torch', 'ray', 'vllm', 'hydra'}} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
