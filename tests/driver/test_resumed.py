"""What a run that goes on keeps of the one before: lines of its files, and the data that it was made with."""

from __future__ import annotations

import json
import logging
import re
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gkd.config import load
from gkd.config.output_files import read_whole_lines
from gkd.data.prompts import fingerprint
from gkd.driver.checkpoints.checkpoint import RunState, SavedCheckpoint, write
from gkd.driver.checkpoints.resume import cut, differences, find, forget_best_after, require_same_data
from gkd.durable import compute_checksum
from gkd.errors import ConfigError
from gkd.observability.metrics import JsonLines
from gkd.types import Prompt


def test_lines_of_steps_that_are_done_again_are_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the characters: some that JSON has as they are end lines elsewhere."""
    caplog.set_level(logging.INFO, "gkd")
    file, text = tmp_path / "metrics.jsonl", "a\u2028b\u2029c\u0085d\ud800e é\n"
    with JsonLines(file) as lines:
        for step in range(6):
            lines.write({"step": step, "text": text})
    assert len(file.read_text(encoding="utf-8").splitlines()) == 6  # for those who read it so
    assert "é" in file.read_text(encoding="utf-8")
    raw = json.dumps({"step": 2, "text": "a\u2028b\u2029c\u0085d"}, ensure_ascii=False)  # as earlier versions wrote it
    file.write_text(file.read_text(encoding="utf-8") + raw + "\nno JSON\n" + '{"step": 6, "lo', encoding="utf-8")
    cut(file, 3)
    assert "line 8 " in caplog.text
    rows = read_whole_lines(file, step=int)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 2]
    assert rows[0]["text"] == text
    cut(tmp_path / "missing.jsonl", 3)


def test_a_file_that_is_cut_is_not_held(tmp_path: Path) -> None:
    """Samples of a long run have more bytes than its driver may take."""
    file = tmp_path / "samples.jsonl"
    with JsonLines(file) as lines:
        for step in range(200):
            lines.write({"step": step, "text": "x" * 100_000})
    tracemalloc.start()
    try:
        cut(file, 150)
        assert tracemalloc.get_traced_memory()[1] < 3e6
    finally:
        tracemalloc.stop()
    assert file.read_bytes().count(b"\n") == 151


def test_what_a_run_cannot_go_on_with_is_refused_before_anything_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "step_5"
    rank = path / "actor" / "rank_0.safetensors"
    rank.parent.mkdir(parents=True)
    rank.write_bytes(b"weights")
    state = RunState(step=5, before={"val/accuracy": 0.1}, validated={"val/accuracy": 0.2, "val/x": 1.0})
    files = {"actor/rank_0.safetensors": compute_checksum(rank)}
    write(SavedCheckpoint(path, "step", state, load({}).model_dump(mode="json"), "", "float32", {}, files))
    for trainer in ({"keep_best": "val/acuracy"}, {"stop_early": {"metric": "val/acuracy"}}):
        with pytest.raises(ConfigError, match=r"=val/acuracy: .*val/accuracy, val/x"):
            find(load({"trainer": trainer}), tmp_path)
    assert find(load({"trainer": {"keep_best": "val/x"}}), tmp_path).state == state
    assert find(load({"trainer": {"total_steps": 5}}), tmp_path).state == state  # whose student is to be written yet
    for content in ("{", '{"metric": "val/x"}', '{"metric": "val/x", "value": 0.5, "step": "5"}', "[" * 100_000):
        (tmp_path / "best.json").write_text(content)
        with pytest.raises(ConfigError, match=r"best\.json"):
            find(load({}), tmp_path)


def test_a_checkpoint_of_another_version_lacks_settings(tmp_path: Path) -> None:
    """Those are as they are by default; what was decided otherwise is refused, and both versions are named."""
    rank = tmp_path / "checkpoints" / "step_5" / "actor" / "rank_0.safetensors"
    rank.parent.mkdir(parents=True)
    rank.write_bytes(b"weights")
    tree = load({}).model_dump(mode="json")
    del tree["algorithm"]["loss"]["temperature"]
    files = {"actor/rank_0.safetensors": compute_checksum(rank)}
    saved = SavedCheckpoint(rank.parents[1], "step", RunState(step=5), tree, "", "float32", {}, files)
    write(replace(saved, version="0.1.0"))
    assert find(load({}), tmp_path).state.step == 5
    for own in ({"data": {"chat_template_kwargs": {"x": 1}}}, {"algorithm": {"name": "grpo"}, "rollout": {"n": 2}}):
        same = {**load(own).model_dump(mode="json")}
        write(replace(saved, config=same, version="0.1.0"))
        assert find(load(own), tmp_path).state.step == 5
    write(replace(saved, version="0.1.0"))
    with pytest.raises(ConfigError, match=r"loss\.temperature=1, .* 3 \(gkd 0\.1\.0 "):
        find(load({"algorithm": {"loss": {"temperature": 3.0}}}), tmp_path)
    write(saved)
    with pytest.raises(ConfigError, match=r"loss\.temperature=null\b"):
        find(load({}), tmp_path)


def test_the_best_validation_is_forgotten_where_it_is_to_be_done_again(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text('{"metric": "val/x", "value": 0.5, "step": 4}')
    forget_best_after(tmp_path, 4)
    assert (tmp_path / "best.json").exists()
    forget_best_after(tmp_path, 3)
    assert not (tmp_path / "best.json").exists()
    forget_best_after(tmp_path, 3)


def test_other_data_is_refused() -> None:
    def prompts(answer: str, *ids: int) -> list[Prompt]:
        return [Prompt(0, np.array(ids, dtype=np.int32), "", answer)]

    own = fingerprint(prompts("1", 2, 3))
    assert own == fingerprint(prompts("1", 2, 3))
    assert len({own, fingerprint(prompts("1", 2, 4)), fingerprint(prompts("2", 2, 3)), fingerprint([])}) == 4
    (prompt,), ids = prompts("1", 2, 3), np.array([5], dtype=np.int32)
    changes: list[dict[str, Any]] = [
        {"id": 1}, {"other_answers": ("2",)}, {"teacher": "math"}, {"answer_ids": ids}, {"teacher_ids": ids}
    ]  # fmt: skip
    assert len({own, *(fingerprint([replace(prompt, **change)]) for change in changes)}) == len(changes) + 1
    data = {"train": own, "val": "0"}
    saved = SavedCheckpoint(Path("/step_1"), "end", RunState(), {}, "", "float32", data, {})
    require_same_data(saved, {"train": own, "val": "0"})
    with pytest.raises(ConfigError, match=r"data\.val_files .*/step_1\b"):
        require_same_data(saved, {"train": own, "val": "1"})
    require_same_data(saved, {"train": own, "val": "0", "val_sets.x": "1"})  # earlier ones state none
    require_same_data(saved, {"train": own, "val": "0", "model.path": "1", "teacher.models.math": "1"})
    data["val_sets.x"] = "2"
    with pytest.raises(ConfigError, match=r"data\.val_sets\.x\.files .*/step_1\b"):
        require_same_data(saved, {"train": own, "val": "0", "val_sets.x": "1"})


@pytest.mark.parametrize("setting", ["model.path", "teacher.model.path", "teacher.models.math", "reference.model.path"])
def test_another_model_is_refused(setting: str) -> None:
    """Figures before and after would be held against different ones."""
    data = {"train": "0", "val": "0", "model.path": "1", "teacher.model.path": "1", setting: "2"}
    saved = SavedCheckpoint(Path("/run/checkpoints/step_1"), "end", RunState(), {}, "", "float32", data, {})
    require_same_data(saved, data)
    outside = {name: its for name, its in data.items() if not name.startswith("teacher")}
    require_same_data(saved, outside)  # such as a teacher that is a server now
    with pytest.raises(ConfigError, match=rf"{re.escape(setting)} .*/step_1\b.* export /run\b"):
        require_same_data(saved, {**data, setting: "3"})


@pytest.mark.parametrize("known", [False, True])
def test_a_model_that_moved_is_the_same_if_its_weights_are_known(known: bool, tmp_path: Path) -> None:
    """Earlier checkpoints do not state them."""
    path = tmp_path / "checkpoints" / "step_5"
    rank = path / "actor" / "rank_0.safetensors"
    rank.parent.mkdir(parents=True)
    rank.write_bytes(b"weights")
    data, files = {"model.path": "1"} if known else {}, {"actor/rank_0.safetensors": compute_checksum(rank)}
    own = {"train_files": ["a"], "val_files": ["a"], "answer_key": "b"}
    here, there = (
        load({"algorithm": {"name": "sft"}, "model": {"path": f"/models/{name}"}, "data": own}) for name in "ba"
    )
    tree = there.model_dump(mode="json")
    write(SavedCheckpoint(path, "step", RunState(step=5), tree, "", "float32", data, files))
    with nullcontext() if known else pytest.raises(ConfigError, match=r"model\.path=/models/a, .* /models/b"):
        assert "model.path /models/a -> /models/b" in differences(find(here, tmp_path), here)
