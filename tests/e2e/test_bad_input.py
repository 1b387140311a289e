"""Everything a user can get wrong before anything runs: one line that names it, exit code 2."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

import pytest
import ray

from tests.e2e.conftest import run_here
from tests.messages import OWN, arguments, entries, make_files, names_what_is_wrong


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize("command", [command for command in entries() if command.startswith(OWN)])
def test_bad_input_is_one_line_and_exit_code_2(command: str, files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of tests/messages.txt; tests/messages.py says how to renew it."""
    connected = ray.is_initialized()
    assert run_here(arguments(command, files)) == 2
    out, err = capfd.readouterr()
    assert err.count("\n") == 1 and err.startswith("error: "), err
    line = err.removeprefix("error: ").strip().replace(str(files), "FILES")
    assert names_what_is_wrong(line, command)
    assert line == entries()[command]
    assert "Traceback" not in out
    assert ray.is_initialized() == connected
    assert not (files / "new" / "metrics.jsonl").exists()


def test_more_gpus_than_there_are_here(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here(arguments("trainer.n_gpus_per_node=500", files)) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "502 GPUs" in err and "trainer.n_gpus_per_node=" in err


def test_a_few_long_prompts_are_counted_and_left_out(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    changed = "data.train_files=[FILES/some_long.jsonl] trainer.gpus=90"  # ends before Ray starts
    assert run_here(arguments(changed, files)) == 2
    assert "data.train_files: 1 of 2 prompts " in capfd.readouterr().out


def test_a_recipe_has_to_be_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here([]) == 2
    assert "+recipe=" in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [["--learning_rate", "1e-5"], ["+recipe=grpo", "--learning-rate=1e-5"]])
def test_options_of_other_systems_are_answered_with_the_setting(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_here(arguments) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"error: unknown option --learning.rate\S*: .* section.name=value \(here: actor.lr\)", line)


def test_a_directory_that_another_run_holds(files: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        assert run_here(arguments(f"trainer.output_dir={tmp_path}", files)) == 2
    finally:
        os.close(held)
    assert "another run" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
