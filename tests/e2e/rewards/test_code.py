"""Programs are run, and may do little."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from gkd.config import Reward
from gkd.rewards.code import Code
from gkd.rewards.completion import Completion
from gkd.rewards.pool import RewardPool
from gkd.rewards.sandbox import ProgramResult, Sandbox, network_can_be_cut, run

OFFLINE = network_can_be_cut()


def worth(program: str, tests: Any, **settings: Any) -> float:
    completion = Completion("", f"```python\n{program}\n```", None, 1, 10, False, columns={"tests": tests})
    return Code(Code.Config(timeout_s=60.0, network=not OFFLINE, **settings))(completion)


def test_a_program_is_worth_the_tests_that_it_passes() -> None:
    double = "def f(x):\n    return 2 * x"
    tests = ["assert f(1) == 2", "assert f(2) == 4", "assert f(2) == 5"]
    assert [worth(double, tests[:2]), worth(double, tests)] == [1.0, 0.0]
    assert worth(double, tests, partial=True) == pytest.approx(2 / 3)
    assert worth("import os\nos._exit(0)", tests[:1]) == 0.0
    io = {"inputs": ["1\n", "4\n"], "outputs": ["2\n", "8"]}
    assert [worth(f"print({n} * int(input()))", io) for n in (2, 3)] == [1.0, 0.0]
    assert worth("this is no program", io) == 0.0
    lines = {"inputs": [["1", "4"]], "outputs": [["2", "8"]]}
    assert [worth(f"print({n} * int(input()), {n} * int(input()), sep='\\n')", lines) for n in (2, 3)] == [1.0, 0.0]
    for code in (1, 126, 127, 255):
        assert worth(f"import os\nos._exit({code})", tests[:1]) == 0.0


def test_humaneval() -> None:
    check = "def check(candidate):\n    assert candidate(1) == 2\n"
    for n, value in ((2, 1.0), (3, 0.0)):
        program = f"```python\ndef f(x):\n    return {n} * x\n```"
        completion = Completion("", program, None, 1, 10, False, columns={"tests": check, "entry_point": "f"})
        assert Code(Code.Config(timeout_s=60.0, network=not OFFLINE))(completion) == value


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [([[[1, 2], 3], [[], 1]], [[3, 6], []]), ([[[1], 2]], [[[2]]]), (["[1, 2]\n3"], ["[3, 6]"])],
)
def test_functions_are_called_with_their_arguments(inputs: list[Any], outputs: list[Any]) -> None:
    tests = {"fn_name": "scale", "inputs": inputs, "outputs": outputs}
    for n, value in (("n", 1.0), ("5", 0.0)):
        function = f"def scale(own, n):\n    return tuple({n} * x for x in own)"
        method = "class Solution:\n    def scale(self, own, n):\n        return [x * " + n + " for x in own]"
        assert [worth(function, tests), worth(method, json.dumps(tests))] == [value] * 2
        each = [{"fn_name": "scale", "input": a, "output": b} for a, b in zip(inputs, outputs, strict=True)]
        leetcode = [{"input": t["input"], "output": t["output"], "metadata": {"func_name": "scale"}} for t in each]
        assert [worth(function, each), worth(method, json.dumps(leetcode))] == [value] * 2
    assert worth("def other():\n    return 1", tests) == 0.0
    by_itself = 'if __name__ == "__main__":\n    print(scale(*map(int, input().split())))'
    assert worth(f"{function}\n{by_itself}", tests) == value  # which has nothing to read where a function is called


def test_time_memory_output_and_environment_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "1")
    assert run("while True: pass", "", 0.5, 512, OFFLINE) == ProgramResult(None, "")
    assert run("x = bytearray(1 << 30)", "", 30.0, 512, OFFLINE).code != 0
    assert len(run("while True: print('a' * 1000)", "", 30.0, 512, OFFLINE).output) <= 1 << 20
    show = "import os, tempfile; print('SECRET_OF_THE_RUN' in os.environ, os.listdir(), 'gkd' in tempfile.gettempdir())"
    seen = run(show, "", 30.0, 512, OFFLINE).output
    assert seen.startswith("False [") and seen.count("'") == 6 and "True" in seen  # program, input and output


@pytest.mark.parametrize("offline", [False] + [True] * OFFLINE)
def test_programs_of_a_sandbox_are_copies_of_one_interpreter_and_know_nothing_of_each_other(
    offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an interpreter for each of the hundred tests that a row may have took longer than a right program may."""
    monkeypatch.setattr("gkd.rewards.sandbox.GRACE_S", 60.0)  # on a busy machine it would be another one else
    show = "import os; print(os.getppid(), len(os.listdir()), 'x' in globals()); x = open('x', 'w')"
    with Sandbox(512, offline) as sandbox:
        first = sandbox.run(show, "", 30.0)
        assert sandbox.run("while True: pass", "", 0.2) == ProgramResult(None, "")
        assert first.output.split()[1:] == ["3", "False"] and first == sandbox.run(show, "", 30.0)
        assert sandbox.run("import os; os.kill(os.getppid(), 9); print(input())", "a", 30.0).code is not None
        assert sandbox.run("print(__name__, input())", "a", 30.0) == ProgramResult(0, "__main__ a\n")


def holds_program(folder: Path, text: str) -> bool:
    """Whether a program with this text lies somewhere in a folder, whose other folders may go while it is read."""
    for place, _, files in os.walk(folder):
        with contextlib.suppress(FileNotFoundError):
            if "program.py" in files and text in Path(place, "program.py").read_text():
                return True
    return False


def test_the_files_of_a_program_go_with_the_process_that_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is killed where its time is over, and at the end of a run."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    settings = {"functions": ["code"], "timeout_s": 60.0, "code": {"timeout_s": 50.0, "network": not OFFLINE}}
    pool = RewardPool(Reward.model_validate({**settings, "workers": 1}))
    try:
        columns = {"tests": ["pass"]}
        future = pool.submit(
            Completion("", "```python\nimport time\ntime.sleep(50)\n```", None, 1, 10, False, columns=columns)
        )["code"]
        deadline = time.monotonic() + 60
        while not holds_program(tmp_path, "sleep"):
            assert time.monotonic() < deadline and not future.done()
            time.sleep(0.05)
    finally:
        pool.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not OFFLINE, reason="this machine does not let a process be without a network")
def test_a_program_has_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = (
            f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5); print('there')"
        )
        assert run(connect, "", 30.0, 512, offline=False).output == "there\n"
        assert run(connect, "", 30.0, 512, offline=True).output == ""


@pytest.mark.parametrize("offline", [False] + [True] * OFFLINE)
def test_a_program_leaves_nothing_behind(offline: bool, tmp_path: Path) -> None:
    """Also with a network, as most containers allow no other namespaces."""
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(1.0); open({str(mark)!r}, 'w')"
    escapes = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)"
    )
    assert run(escapes, "", 30.0, 512, offline).code == 0
    assert run(f"{escapes}; time.sleep(60)", "", 0.5, 512, offline).code is None
    twice = f"import os; os.fork() or os.setsid() or os.fork() or ({escapes!r} and exec({escapes!r})); os._exit(0)"
    assert run(twice, "", 30.0, 512, offline).code == 0
    time.sleep(1.5)
    assert not mark.exists()
