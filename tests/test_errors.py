"""What a program says when it ends early, and with which code, also where nobody reads it any more."""

from __future__ import annotations

import io
import json
import os
import pwd
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError, model_validator

from gkd import errors
from gkd.cli import train as main
from gkd.cluster.session.shutdown import run_within
from gkd.config.registry import Registry
from gkd.errors import (
    ConfigError,
    ControlLost,
    RunFailed,
    SignalExit,
    catch_errors,
    describe_error,
    describe_place,
    entry_point,
    one_line,
)


def test_a_call_with_a_deadline_gives_what_it_raises() -> None:
    def fail() -> None:
        raise ValueError("why")

    with pytest.raises(ValueError, match="why"):
        run_within(10.0, "failing", fail)
    assert run_within(10.0, "sleeping", lambda: time.sleep(0.01))


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (SignalExit(signal.SIGTERM), "stopped by SIGTERM; a note", 143),
        (SignalExit(signal.SIGINT), "stopped by Ctrl-C; a note", 130),
        (ConfigError("no"), "error: no; a note", 2),
        (RunFailed("no"), "failed: no; a note", 1),
        (ControlLost("no"), "failed: no; a note", 1),
        (FileNotFoundError(2, "absent", "here"), "failed: absent: here; a note", 1),
    ],
)
def test_every_end_is_one_line(error: BaseException, line: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    error.add_note("a note")

    def program() -> int:
        raise error

    assert catch_errors(program) == code
    assert capfd.readouterr().err == line + "\n"


class Validated(BaseModel):
    """Refuses, as settings of another program do."""

    number: int = 1
    other: int = 1

    @model_validator(mode="after")
    def _refuse(self) -> Validated:
        raise ValueError("one [1] and\n  two")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({}, r"one \[1\] and two"),
        ({"number": "x"}, r"number: Input should be [^()]*"),
        ({"number": "x", "other": "y"}, r"number: Input should be .* \(and 1 more\)"),
    ],
)
def test_of_a_validation_error_of_pydantic_its_first_message_is_the_line(values: dict[str, str], line: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Validated.model_validate(values)
    for text in (one_line(caught.value), describe_error(caught.value)):
        assert re.fullmatch(line, text) and "pydantic" not in text and "input_" not in text
    assert describe_error(ValueError("one\ntwo")) == "ValueError: one two"


@pytest.mark.parametrize("error", ["KeyError('cost')", "SystemExit(0)"])
def test_what_a_file_of_ones_own_raises_is_a_line_with_its_place(
    error: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Wherever it is called, as an engine's ``memory`` by a plan."""
    file = tmp_path / "costs.py"
    file.write_text(f"def cost():\n    raise {error}\n")
    assert catch_errors(Registry("section.name", {}).load(f"{file}:cost")) == 1
    assert re.fullmatch(rf"failed: {error[:8]}.*: .*\({file}, line 2\)\n", capfd.readouterr().err)


def test_the_place_is_the_last_line_in_a_file_of_ones_own() -> None:
    """Not in a package that is installed, or Python's own."""
    files = ("/home/me/run.py", "/home/me/costs.py", "/x/site-packages/numpy/core.py", json.__file__, errors.__file__)
    trace = "".join(f'  File "{file}", line {n}, in f\n' for n, file in enumerate(files, 1))
    assert describe_place(trace) == " (/home/me/costs.py, line 2)"


def test_an_error_of_ones_own_steers_no_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "costs.py"
    file.write_text("def cost():\n    raise RuntimeError('is \\x1b[31mred \\u200b\\x07é 中')\n")
    assert catch_errors(Registry("section.name", {}).load(f"{file}:cost")) == 1
    assert capfd.readouterr().err == f"failed: RuntimeError: is [31mred é 中 ({file}, line 2)\n"


def test_what_the_terminal_has_no_letter_for_does_not_end_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))

    @entry_point
    def program(_: Sequence[str]) -> int:
        print("a █ bar")
        return 0

    assert program([]) == 0
    assert written.getvalue() == b"a ? bar\n"


def test_a_user_without_a_name_and_a_home_has_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(user: int) -> None:
        raise KeyError(user)

    for name in ("HOME", "USER"):
        monkeypatch.setenv(name, "before")  # puts back what the function sets
        monkeypatch.delenv(name)
    main._require_home(None)  # this one is known
    assert "HOME" not in os.environ
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError, match=r"^user \d+ .*data\.cache_dir=DIR"):
        main._require_home(None)
    main._require_home(str(tmp_path))
    assert os.environ["HOME"] == str(tmp_path)
    assert os.environ["USER"] == f"uid{os.getuid()}"
