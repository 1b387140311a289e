"""Checks that end in every way there is, for the tests of the acceptance run itself."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.gpu.checks.context import Context, Skipped, require
from tests.gpu.checks.program import run


def fine(context: Context) -> None:
    """Has figures."""
    context.note(speed=1.23456789, n_gpus=context.n_gpus)


def fails(context: Context) -> None:
    """Finds something wrong, after a figure."""
    context.note(seen=2)
    require(context.figures["seen"] == 3, "2 is not 3")


def raises(context: Context) -> None:
    """Breaks."""
    raise KeyError("nothing there")


def skips(context: Context) -> None:
    """Cannot run here."""
    raise Skipped("needs a lake")


def dies(context: Context) -> None:
    """Is killed, as by the kernel when memory runs out."""
    context.note(before=1)
    print("about to die", flush=True)
    os.kill(os.getpid(), 9)


def hangs(context: Context) -> None:
    """Waits for ever, and so does a process of a session of its own that it started."""
    command = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
    started = subprocess.Popen(command, start_new_session=True)
    context.note(pid=started.pid)
    print("it waits", flush=True)
    time.sleep(600)


def leaves_a_process(context: Context) -> None:
    """Ends well and leaves one running."""
    context.note(pid=subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)


def breaks_at_the_end(context: Context) -> None:
    """Ends well, and the process does not, as where a library takes down what another still uses."""
    atexit.register(os.abort)


def runs_a_program(context: Context) -> None:
    """Waits for a run that does not end after its first step."""
    run(context, "small", program=("tests.gpu.fakes",))


def do_one_step(output: Path) -> None:
    """Be that run."""
    signal.signal(signal.SIGTERM, lambda *_: (print("it is being ended", flush=True), os._exit(1)))
    output.mkdir()
    rows = [{"step": 0}, {"step": 1, "timing_s/step": 2.5, "perf/pid": os.getpid()}]
    (output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 2')
    print("a step is done", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    do_one_step(Path(next(text for text in sys.argv if text.startswith("trainer.output_dir=")).partition("=")[2]))
