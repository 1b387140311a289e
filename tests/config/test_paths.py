"""Which settings are paths, and what they are from another directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from gkd.config import load
from gkd.config.paths import with_absolute_paths


def test_what_exists_here_is_named_as_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what does not may be a name in Hugging Face's cache."""
    for directory in ("student", "one", "set"):
        (tmp_path / directory).mkdir()
    for file in ("a.jsonl", "b.jsonl", "one/model.txt"):
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    config = load(
        {
            "model": {"path": "student"},
            "teacher": {"models": {"x": "one", "y": "Qwen/Qwen2.5-7B"}, "n_gpus_per_node": 2},
            "data": {
                "train_files": ["a.jsonl", "?.jsonl", "set:train", "openai/gsm8k:main:train", "/elsewhere/c.jsonl"],
                "val_files": ["b.jsonl"],
                "val_sets": {"a.b": {"files": ["b.jsonl"], "answer_key": "x"}},
                "teacher_key": "which",
            },
        }
    )
    whole = load(with_absolute_paths(config.model_dump(), tmp_path))
    assert whole.model.path == f"{tmp_path}/student"
    assert whole.teacher.models == {"x": f"{tmp_path}/one", "y": "Qwen/Qwen2.5-7B"}
    here = [f"{tmp_path}/{name}" for name in ("a.jsonl", "?.jsonl", "set:train")]
    assert whole.data.train_files == [*here, "openai/gsm8k:main:train", "/elsewhere/c.jsonl"]
    assert whole.data.val_sets["a.b"].files == [f"{tmp_path}/b.jsonl"]
    assert load(with_absolute_paths(whole.model_dump(), tmp_path.parent)) == whole
    unchanged = {"model": config.model, "teacher": config.teacher, "data": config.data}
    assert whole.model_copy(update=unchanged) == config
