"""A run's directory while the run's process replaces itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gkd.durable import is_held

PROGRAM = """
import sys, time
from pathlib import Path
from gkd.driver.output_dir import claim
from gkd.durable import hand_on

descriptor = claim(Path(sys.argv[1]))
print("held", flush=True)
if len(sys.argv) == 2:
    import os
    hand_on(descriptor)
    os.execv(sys.executable, [sys.executable, __file__, sys.argv[1], "again"])
time.sleep(0.2)
"""


def test_it_is_held_all_the_time(tmp_path: Path) -> None:
    program, run = tmp_path / "program.py", tmp_path / "run"
    program.write_text(PROGRAM)
    run.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, program, run], stdout=subprocess.PIPE, text=True, env=environment) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        looks = []
        os.set_blocking(first.stdout.fileno(), False)
        while not (line := first.stdout.readline()):
            looks.append(is_held(run))
        assert line == "held\n" and all(looks)
        assert first.wait(60) == 0
    assert not is_held(run)
