"""Files of a line a record, read while a run writes them."""

from __future__ import annotations

import json
from pathlib import Path

from gkd.config.output_files import LineReader


def text(*steps: int, offset: float = 0.0) -> str:
    return "".join(json.dumps({"step": step, "loss": step + offset}) + "\n" for step in steps)


def steps(lines: LineReader) -> list[int]:
    return [row["step"] for row in lines.read()]


def test_lines_that_were_read_are_not_parsed_again(tmp_path: Path) -> None:
    """A monitor of a long run would do nothing else."""
    file = tmp_path / "metrics.jsonl"
    lines = LineReader(file, step=int)
    assert steps(lines) == []
    file.write_text(text(0, 1) + '{"step": 2, "lo')
    assert steps(lines) == [0, 1]
    with file.open("r+") as written:
        written.write("x")  # the first line is no JSON any more
    with file.open("a") as written:
        written.write('ss": 3.0}\n' + text(3))
    assert steps(lines) == steps(lines) == [0, 1, 2, 3]


def test_what_a_run_that_goes_on_has_cut_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = LineReader(file, step=int)
    file.write_text(text(0, 1, 2, 3))
    assert steps(lines) == [0, 1, 2, 3]
    file.write_text(text(0, 1))
    assert steps(lines) == [0, 1]
    file.write_text(text(0) + text(1, 2, offset=0.5))  # cut, and as long as before or longer since
    assert [row["loss"] for row in lines.read()] == [0.0, 1.5, 2.5]
    file.unlink()
    assert steps(lines) == []
