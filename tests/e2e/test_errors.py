"""How programs end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.error_text import contains_in_order

ROOT = Path(__file__).parents[2]
STUCK = """
import threading
from gkd.cluster.session.shutdown import leave, run_within
assert not run_within(0.1, "waiting for ever", threading.Event().wait)
threading.Thread(target=threading.Event().wait).start()  # which Python would wait for at its end
print("the last words")
leave(7)
"""
LARGE = """
from gkd.cluster.session.shutdown import leave, skip_teardown
skip_teardown()
import atexit, sys
class Library:
    def __del__(self):
        print("taken down")
sys.library = Library()
atexit.register(print, "registered", flush=False)
sys.file = open(sys.argv[1], "w")  # which nobody closes
sys.file.write("written")
leave(7)
"""
RICH = """
import sys
from gkd.errors import catch_errors
from gkd.observability.progress import console
def program():
    out = console()
    for _ in range(100_000):
        out.print("a line")
sys.exit(catch_errors(program))
"""


def python(*arguments: str, **streams: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, text=True, **streams)


@pytest.mark.parametrize(
    "command",
    [
        ("gkd.main", "--settings"),
        ("gkd", "settings", "lr"),
        ("gkd.main", "--config", "+recipe=grpo"),
        ("gkd.plan", "+recipe=grpo", "model.size=7b", "plan.gpu_type=h100-80gb"),
    ],
)
def test_a_program_that_prints_alone_ends_silently_with_its_reader(command: tuple[str, ...]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    program = python("-m", *command, stdout=writes, stderr=subprocess.PIPE)
    os.close(writes)
    assert program.communicate(timeout=60)[1] == ""
    assert program.returncode == -signal.SIGPIPE  # which a shell calls 141


def test_another_programs_output_into_a_closed_pipe_ends_it_with_a_line_and_a_code() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    program = python("-c", RICH, stdout=writes, stderr=subprocess.PIPE)
    both = python("-c", RICH, stdout=writes, stderr=writes)
    os.close(writes)
    (line,) = program.communicate(timeout=60)[1].splitlines()
    assert contains_in_order(line, "failed: ", "standard output")
    assert (program.returncode, both.wait(60)) == (1, 1)


def test_a_program_does_what_is_registered_for_its_end_and_takes_nothing_down(tmp_path: Path) -> None:
    program = python("-c", LARGE, str(tmp_path / "file"), stdout=subprocess.PIPE)
    assert program.communicate(timeout=30)[0] == "registered\n"
    assert program.returncode == 7
    assert (tmp_path / "file").read_text() == "written"


def test_a_program_leaves_with_its_code_where_a_call_never_returns() -> None:
    program = python("-c", STUCK, stdout=subprocess.PIPE)
    assert program.communicate(timeout=30)[0] == "the last words\n"
    assert program.returncode == 7


def test_adapters_bring_no_lines_of_the_libraries_below_them() -> None:
    command = [sys.executable, "-c", "import gkd.actor.lora"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
