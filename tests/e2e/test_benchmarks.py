"""A program of tests/benchmarks that takes the real workers apart still runs; of the others mypy checks the names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import environment

ROOT = Path(__file__).parents[2]
SHORT = ["--steps", "1", "--staleness", "0", "--streaming", "no", "--scale", "0.05", "--bound", "actor"]


def test_overlap_prints_a_row_of_its_table(tmp_path: Path) -> None:
    """At a twentieth of its times, at which its bounds need not hold: it exits with 1 where they do not."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "benchmarks" / "overlap.py", *SHORT, "--timelines", tmp_path],
        cwd=ROOT,
        env={**environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    header, row = (line for line in done.stdout.splitlines() if "Worker pid=" not in line)
    assert header.startswith("bound by") and header.endswith("whole run")
    bound, streaming, staleness, *figures = row.split()
    assert (bound, streaming, staleness) == ("actor", "False", "0")
    assert len(figures) == 8 and all(float(figure) > 0 for figure in figures[:5])
    assert [file.name for file in tmp_path.iterdir()] == ["actor_whole_0.json"]
