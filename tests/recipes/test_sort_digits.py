"""Making the models of the sorting task: once, whole or not at all, in a process that never outlives this one."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gkd.cluster import host
from gkd.config import Config, load
from gkd.data.task import ReportFn, TaskInputs, task_of
from gkd.recipes.sort_digits import warmup
from gkd.recipes.sort_digits.sorting import draw, token_rows
from gkd.recipes.sort_digits.task import SortDigits, make_data, recipes


def config(cache: Path, seed: int = 0, teacher_steps: int = 1, student_steps: int = 1) -> Config:
    own = {"digits": 3, "teacher_steps": teacher_steps, "student_steps": student_steps}
    data = {"task": "sort_digits", "cache_dir": str(cache), "sort_digits": own}
    return load({"trainer": {"seed": seed}, "data": data})


def prepare(config: Config, report: ReportFn) -> TaskInputs:
    return task_of(config).make(report)


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def test_seeds_share_the_teacher_and_validation_but_not_student_and_training_data(tmp_path: Path) -> None:
    (teacher, student), (same_teacher, other_student) = (recipes(SortDigits.Config(), seed) for seed in (0, 1))
    assert teacher.directory(tmp_path) == same_teacher.directory(tmp_path)
    assert student.directory(tmp_path) != other_student.directory(tmp_path)
    first, second = (make_data(tmp_path, 8, seed, lambda _: None) for seed in (0, 1))
    assert (first / "val.jsonl").read_bytes() == (second / "val.jsonl").read_bytes()
    assert (first / "train.jsonl").read_bytes() != (second / "train.jsonl").read_bytes()


def test_training_stops_at_the_wanted_accuracy_and_is_the_same_for_the_same_seed() -> None:
    _, student = recipes(SortDigits.Config(digits=2, student_steps=400), seed=3)
    lines: list[str] = []
    first, second = ((model := warmup.new_model(student), warmup.train(model, student, lines.append)) for _ in range(2))
    assert first[1] == second[1]
    assert first[1].steps < 400
    assert first[1].accuracy >= 0.25
    for one, other in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_measured_accuracy_is_that_of_greedy_decoding() -> None:
    _, student = recipes(SortDigits.Config(digits=2, student_steps=60), seed=0)
    student = replace(student, stop_at=0.5)
    model = warmup.new_model(student)
    warmup.train(model, student, lambda _: None)
    ids = torch.from_numpy(token_rows(draw(np.random.default_rng(1), 64, 2, "train")))
    greedy = model.generate(ids[:, :4], max_new_tokens=3, do_sample=False)
    assert warmup.exact_accuracy(model, ids, student) == (greedy == ids).all(1).float().mean().item()


def test_the_process_has_as_many_threads_as_it_may_use_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, which may have a share of the machine's."""
    threads: list[int] = []
    monkeypatch.setattr(warmup, "_end_with_parent", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(host, "cores", lambda: 3)
    monkeypatch.setattr(sys, "argv", ["warmup", str(tmp_path), "[]"])
    warmup.main()
    assert threads == [3]
