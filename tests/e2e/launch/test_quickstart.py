"""launch/quickstart.sh: which run it starts once all is installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "launch" / "quickstart.sh"


@pytest.mark.parametrize(
    ("arguments", "recipes"),
    [
        ([], ["+recipe=on_policy_distill"]),
        (["trainer.total_steps=5"], ["+recipe=on_policy_distill"]),
        (["trainer.total_steps=5", "+recipe=grpo"], ["+recipe=grpo"]),
    ],
)
def test_a_recipe_that_is_named_is_the_only_one(arguments: list[str], recipes: list[str]) -> None:
    start = SCRIPT.read_text().partition("\nenvironment\n")[2]
    command = ["bash", "-euc", f"PYTHON=echo\n{start}", "bash", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    words = done.stdout.split()
    assert words[:2] == ["-m", "gkd.main"] and set(arguments) <= set(words)
    assert [word for word in words if word.startswith("+recipe=")] == recipes
