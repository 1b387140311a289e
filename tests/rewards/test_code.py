"""Which program of a response is run against which tests."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, Self

import pytest

from gkd.rewards.code import Code, passes, program_of, read_tests
from gkd.rewards.completion import Completion


def test_the_last_python_block_is_the_program() -> None:
    response = "First\n```python\na\n```\nthen\n```py\nb\n```\nprints\n```\nc\n```"
    assert program_of(response) == "b\n"
    assert program_of("```\na\n``` ```\nb\n```") == "b\n"
    assert program_of("print(1)") == "print(1)"
    in_a_list = "1. So:\n   ```python\n   def f():\n       return 1\n   ```\n"
    assert program_of(in_a_list).rstrip() == "def f():\n    return 1"


@pytest.mark.parametrize(
    ("column", "tests"),
    [
        ("assert f(1) == 2", [("assert f(1) == 2", None)]),
        (["assert a", "assert b"], [("assert a", None), ("assert b", None)]),
        ({"inputs": ["1\n", 2], "outputs": ["2\n", 3]}, [("1\n", "2\n"), ("2", "3")]),
        ([{"input": "1", "output": "2"}], [("1", "2")]),
    ],
)
def test_tests_of_every_kind_also_as_json(column: Any, tests: list[tuple[str, str | None]]) -> None:
    assert read_tests(column) == tests
    assert read_tests(json.dumps(column)) == tests


def test_a_function_that_checks_is_called_with_the_entry_point() -> None:
    """As HumanEval has it: defined alone, it would let every program pass."""
    check = "def check(candidate):\n    assert candidate(1) == 2\n"
    assert read_tests(check, "f") == [(f"{check}\n\ncheck(f)", None)]
    assert read_tests([f"{check}\ncheck(f)"]) == [(f"{check}\ncheck(f)", None)]
    with pytest.raises(ValueError, match=r"check.*entry_point"):
        read_tests(check)


@pytest.mark.parametrize("use", ["assert check(f(1))", "for a, b in PAIRS:\n    check(a, b)"])
def test_a_test_with_a_helper_of_that_name_is_left_as_it_is(use: str) -> None:
    test = f"def check(*values):\n    return True\n{use}\n"
    assert read_tests(test, "f") == read_tests(test) == [(test, None)]


@pytest.mark.parametrize(
    "column",
    [
        [],
        None,
        3,
        {"input": 1},
        [3],
        {"inputs": [1], "outputs": []},
        [{"input": "1", "output": "2", "testtype": "functional"}],
    ],
)
def test_what_is_no_test(column: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_tests(column)


class PlayedSandbox:
    """Ends every program with the output "2", after four seconds."""

    limits: list[float]

    def __init__(self, clock: list[float], code: int = 0) -> None:
        self.clock, self.code, self.limits = clock, code, []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, program: str, stdin: str, timeout_s: float, name: str = "") -> Any:
        self.limits.append(timeout_s)
        self.clock[0] += 4.0
        return SimpleNamespace(code=self.code, output="2\n")


def test_a_program_that_fails_after_its_output_passes_nothing() -> None:
    for code, passed in ((0, True), (1, False), (-9, False)):
        sandbox: Any = PlayedSandbox([0.0], code)
        assert passes("print(2)", ("1", "2"), sandbox, 1.0) == passed


@pytest.mark.parametrize(("partial", "reward"), [(False, 0.0), (True, 0.5)])
def test_all_tests_of_a_response_have_the_time_together(
    partial: bool, reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    sandbox = PlayedSandbox(clock)
    monkeypatch.setattr("gkd.rewards.code.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr("gkd.rewards.code.network_can_be_cut", lambda: True)
    monkeypatch.setattr("gkd.rewards.code.Sandbox", lambda memory_mb, offline: sandbox)
    tests = {"inputs": ["1"] * 4, "outputs": ["2"] * 4}
    completion = Completion("", "print(2)", None, 5, 10, False, columns={"tests": tests})
    assert Code(Code.Config(timeout_s=6.0, partial=partial))(completion) == reward
    assert sandbox.limits == [6.0, 2.0]  # the third would begin after the time is over
