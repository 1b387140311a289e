"""The reward of a program that is run against the tests of its row."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import textwrap
import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field

from gkd.config.base import Settings
from gkd.data.row import Row
from gkd.rewards.completion import Completion, RewardFunction
from gkd.rewards.sandbox import Sandbox, network_can_be_cut

_FENCED = re.compile(r"```([\w+]*)[^\n]*\n(.*?)```", re.DOTALL)
Test = tuple[str, str | None]
"""Python to be run after the program, or standard input and the output that is expected of it."""


class Code(RewardFunction):
    """Gives 1.0 to a response whose program passes all tests of its row, else 0.0.

    The program is the last fenced block, of Python where there is one; without any, the whole response. Tests are, in
    the column ``tests``: Python text with assertions, or a list of such texts (MBPP); or text with a function ``check``
    that is called with the column ``entry_point`` (HumanEval); or inputs with the outputs that are expected, as
    ``{"inputs": [...], "outputs": [...]}`` (APPS) or a list of ``{"input", "output"}``. JSON of any of these will do,
    and an input or output that is a list is its lines. With ``"fn_name"``, also of one test of a list, inputs and
    outputs are the arguments and the result of that function, or method of the class ``Solution``. Each test is a
    process of its own (:mod:`gkd.rewards.sandbox`).
    """

    class Config(Settings):
        """Column of the tests, and limits of a program."""

        tests: str = Field("tests", description="column of the tests, such as reward_model.ground_truth")
        timeout_s: float = Field(6.0, gt=0, description="time all tests of one response have, below reward.timeout_s")
        memory_mb: int = Field(1024, ge=64, description="memory that a program may take, MiB")
        partial: bool = Field(False, description="true: the share of the tests that are passed; false: all or nothing")
        network: bool = Field(False, description="true: programs may use the network, where it cannot be taken away")

    needs_columns: ClassVar[bool] = True
    ends_within: ClassVar[str] = "timeout_s"
    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if not config.network and not network_can_be_cut():
            raise RuntimeError(
                "this machine does not let programs be run without a network (unshare of a user namespace): "
                "reward.code.network=true runs them with it"
            )

    @classmethod
    def required_columns(cls, config: Config) -> Mapping[str, str]:
        """Return the column of the tests."""
        return {"reward.code.tests": config.tests}

    def __call__(self, completion: Completion) -> float:
        """Return the reward. Raises ValueError where the row has no tests."""
        row = Row(dict(completion.columns), "the row")
        tests = read_tests(row.get(self.config.tests, "reward.code.tests"), row.find("entry_point"))
        program, deadline, passed = program_of(completion.response), time.monotonic() + self.config.timeout_s, 0
        with Sandbox(self.config.memory_mb, offline=not self.config.network) as sandbox:
            for test in tests:
                left = deadline - time.monotonic()
                if left > 0 and passes(program, test, sandbox, left):
                    passed += 1
                elif not self.config.partial:
                    return 0.0
        return passed / len(tests)


def passes(program: str, test: Test, sandbox: Sandbox, timeout_s: float) -> bool:
    """Return whether a program passes a test in ``timeout_s``."""
    test_input, expected = test
    if expected is not None:
        ended = sandbox.run(program, test_input, timeout_s)
        return ended.code == 0 and _lines(ended.output) == _lines(expected)
    # A program that ends the process early would else have passed; it cannot print this word.
    word, with_test = secrets.token_hex(16), f"{program}\n\n{test_input}\n\nprint('\\n"
    # As a module, whose part for a program that is run by itself (if __name__ == "__main__") has nothing to read.
    ended = sandbox.run(f"{with_test}{word}')\n", "", timeout_s, name="program")
    return ended.code == 0 and ended.output.endswith(f"\n{word}\n")


def program_of(response: str) -> str:
    """Return the program in a response."""
    blocks: list[tuple[str, str]] = _FENCED.findall(response)
    python = [text for language, text in blocks if language.lower() in ("python", "py", "python3")]
    return textwrap.dedent((python or [text for _, text in blocks] or [response])[-1])  # a list's item is indented


def read_tests(column: Any, entry_point: str | None = None) -> list[Test]:
    """Return the tests in a column, see :class:`Code`. Raises ValueError for what is none."""
    if isinstance(column, str):
        with contextlib.suppress(ValueError):
            column = json.loads(column)
        column = [column] if isinstance(column, str) else column
    tests = [(_call_check(test, entry_point) if output is None else test, output) for test, output in _tests(column)]
    if not tests:
        raise ValueError("the row has no tests")
    return tests


def _tests(column: Any) -> Iterator[Test]:
    if isinstance(column, dict) and {"inputs", "outputs"} <= column.keys():
        for test_input, expected in zip(column["inputs"], column["outputs"], strict=True):
            if name := column.get("fn_name"):
                yield _call(str(name), test_input, expected), None
            else:
                yield _text(test_input), _text(expected)
    elif isinstance(column, list):
        for test in column:
            if isinstance(test, str):
                yield test, None
            elif isinstance(test, dict) and {"input", "output"} <= test.keys():
                if name := _function_of(test):
                    yield _call(name, test["input"], test["output"]), None
                else:
                    yield _text(test["input"]), _text(test["output"])
            else:
                raise ValueError(f"a test is text, or input and output, not {type(test).__name__}")
    else:
        raise ValueError(f"tests are text, a list, or inputs and outputs, not {type(column).__name__}")


def _function_of(test: Mapping[str, Any]) -> str | None:
    """Return the function that a test calls: ``fn_name``, or as LiveCodeBench has it. Raises ValueError for no name."""
    metadata = test.get("metadata")
    name = test.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None)
    if name is None and "function" in str(test.get("testtype") or test.get("type")):
        raise ValueError("a test calls a function, and has no fn_name that states which")
    return name


def _call_check(test: str, entry_point: str | None) -> str:
    """Return a test that calls the function ``check`` which it defines; one that only defines it tests nothing."""
    if not re.search(r"^def check\(", test, re.MULTILINE) or re.search(r"(?<!def )\bcheck\(", test):
        return test
    if not entry_point:
        raise ValueError("the test defines check, and the row has no entry_point that it is called with")
    return f"{test}\n\ncheck({entry_point})"


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(name: str, arguments: Any, expected: Any) -> str:
    """Return Python that calls the function ``name`` and asserts what it returns; APPS has some results in a list.

    Text is the arguments as JSON, one a line, and the result as JSON (LiveCodeBench).
    """
    if isinstance(arguments, str):
        arguments, expected = [_decode(line) for line in arguments.splitlines()], _decode(expected)
    return (
        "import json\n"
        f"expected = json.loads({json.dumps(expected)!r})\n"
        f"function = getattr(Solution(), {name!r}) if 'Solution' in globals() else globals()[{name!r}]\n"
        f"given = json.loads(json.dumps(function(*json.loads({json.dumps(arguments)!r}))))\n"
        "assert given == expected or [given] == expected"
    )


def _decode(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
