"""How many threads a process without a GPU computes with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gkd.cluster.workers.environment import compute_threads, environment


def model(directory: Path, megabytes: float, files: int = 1) -> str:
    directory.mkdir()
    for number in range(files):
        with Path(directory, f"model-{number}.safetensors").open("wb") as weights:
            weights.truncate(int(megabytes / files * (1 << 20)))
    Path(directory, "config.json").write_text("{}" * 4_000_000)  # no weights
    return str(directory)


@pytest.mark.parametrize(
    ("megabytes", "files", "threads"), [(0.5, 1, 1), (4, 2, 1), (5, 1, 2), (30, 3, 8), (400, 4, 16)]
)
def test_a_process_has_as_many_threads_as_its_model_is_large(
    megabytes: float, files: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    small, own = model(tmp_path / "small", 0.1), model(tmp_path / "own", megabytes, files)
    assert compute_threads([own]) == compute_threads([small, own]) == threads
    assert compute_threads([own], n_threads=3) == 3
    assert environment("cpu", [own])["OMP_NUM_THREADS"] == str(threads)
