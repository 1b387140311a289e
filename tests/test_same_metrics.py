"""The comparison of two runs' metrics, by hand-made rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gkd.errors import ConfigError
from tests.same_metrics import main

ROWS: list[dict[str, Any]] = [
    {"step": 1, "actor/loss": 0.1 + 0.2, "timing_s/step": 1.0, "reward/exact/seconds": 0.5, "reward/exact/mean": 1},
    {"step": 2, "actor/loss": 0.25, "perf/tokens_per_second": 7.0},
]


def written(directory: Path, rows: list[dict[str, Any]]) -> str:
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(directory)


@pytest.mark.parametrize(
    ("others", "code", "names"),
    [
        ([ROWS[0] | {"timing_s/step": 2.0, "reward/exact/seconds": 0.6}, ROWS[1] | {"perf/busy/actor": 1.0}], 0, []),
        ([ROWS[0] | {"actor/loss": 0.3}, ROWS[1]], 1, ["actor/loss"]),  # the last bit
        ([ROWS[0], ROWS[1] | {"val/accuracy": 0.5}], 1, ["val/accuracy"]),  # one alone has it
        (ROWS[:1], 1, ["step", "actor/loss"]),
    ],
)
def test_runs_are_equal_but_for_the_clock(
    others: list[dict[str, Any]], code: int, names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [written(tmp_path / "a", ROWS), written(tmp_path / "b", others)]
    assert main(runs) == main(runs[::-1]) == code
    first, *lines = capsys.readouterr().out.splitlines()[: 1 + len(names)]
    assert [line.split("  ")[0] for line in lines] == names
    assert int(first.split()[0]) == 5 - len([name for name in names if name != "val/accuracy"])


def test_a_run_without_rows_is_equal_to_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"b: .*metrics.jsonl"):
        main([written(tmp_path / "a", ROWS), written(tmp_path / "b", [])])
