"""Making the built-in models: once, whole or not at all, and in a process that never outlives this one."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gkd.config import Builtin, Config, Trainer
from gkd.data import builtin, warmup
from gkd.data.builtin import making, recipes
from gkd.data.sorting import draw, token_rows


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def test_seeds_share_the_teacher_and_validation_but_not_student_and_training_data(tmp_path: Path) -> None:
    (teacher, student), (same_teacher, other_student) = (recipes(Builtin(), seed) for seed in (0, 1))
    assert teacher.directory(tmp_path) == same_teacher.directory(tmp_path)
    assert student.directory(tmp_path) != other_student.directory(tmp_path)
    first, second = (
        builtin._make_data(tmp_path, Config(trainer=Trainer(seed=seed)), lambda _: None) for seed in (0, 1)
    )
    assert (first / "val.jsonl").read_bytes() == (second / "val.jsonl").read_bytes()
    assert (first / "train.jsonl").read_bytes() != (second / "train.jsonl").read_bytes()


def test_training_stops_at_the_wanted_accuracy_and_is_the_same_for_the_same_seed() -> None:
    _, student = recipes(Builtin(digits=2, student_steps=400), seed=3)
    said: list[str] = []
    first, second = ((model := warmup.new_model(student), warmup.train(model, student, said.append)) for _ in range(2))
    assert first[1] == second[1]
    assert first[1].steps < 400
    assert first[1].accuracy >= 0.25
    for one, other in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_measured_accuracy_is_that_of_greedy_decoding() -> None:
    _, student = recipes(Builtin(digits=2, student_steps=60), seed=0)
    student = replace(student, stop_at=0.5)
    model = warmup.new_model(student)
    warmup.train(model, student, lambda _: None)
    ids = torch.from_numpy(token_rows(draw(np.random.default_rng(1), 64, 2, "train")))
    greedy = model.generate(ids[:, :4], max_new_tokens=3, do_sample=False)
    assert warmup.exact_accuracy(model, ids, student) == (greedy == ids).all(1).float().mean().item()


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "entry.unfinished").mkdir()
    (tmp_path / "entry.unfinished" / "half").touch()
    with making(tmp_path / "entry", lambda _: None) as unfinished:
        assert unfinished is not None
        (unfinished / "whole").touch()
    assert [path.name for path in (tmp_path / "entry").iterdir()] == ["whole"]


def test_two_at_once_make_an_entry_once(tmp_path: Path) -> None:
    makers: list[int] = []
    said: list[str] = []

    def make(number: int) -> None:
        with making(tmp_path / "entry", said.append) as unfinished:
            if unfinished is not None:
                makers.append(number)
                time.sleep(0.5)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(makers) == 1
    assert said == ["another run is making entry; waiting for it"] * 2


def test_an_exception_leaves_no_entry(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"), making(tmp_path / "entry", lambda _: None):
        raise OSError("disk full")
    assert entries(tmp_path) == []


def test_the_cache_is_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert builtin.cache_directory(Builtin()) == Path("/xdg/gkd")
    assert builtin.cache_directory(Builtin(cache_dir="/mine")) == Path("/mine")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert builtin.cache_directory(Builtin()) == Path.home() / ".cache" / "gkd"
