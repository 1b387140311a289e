"""Models and data of a run, found and checked before Ray starts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from gkd.config import Config, load
from gkd.driver.inputs.find import find_inputs
from tests.data.models import TEMPLATE, save_model, word_tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    save_model(directory / "chat", tokenizer=word_tokenizer(template=TEMPLATE))
    save_model(directory / "base")
    (directory / "text.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    return directory


def own(models: Path, model: str, **data: Any) -> Config:
    files = [str(models / "text.jsonl")]
    return load(
        {
            "algorithm": {"name": "grpo"},
            "rollout": {"n": 2, "engine": "hf"},
            "reward": {"functions": ["accuracy"]},
            "model": {"path": str(models / model)},
            "data": {"train_files": files, "val_files": files, "answer_key": "answer", **data},
        }
    )


@pytest.mark.parametrize(
    ("model", "data", "warned"),
    [
        ("chat", {}, True),
        ("chat", {"apply_chat_template": False}, False),
        ("chat", {"apply_chat_template": True}, False),
        ("base", {}, False),
    ],
)
def test_a_chat_model_that_gets_plain_text_is_warned_of(
    models: Path, model: str, data: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gkd"):
        inputs = find_inputs(own(models, model, **data), lambda line: None)
    assert ("data.apply_chat_template=true" in caplog.text) is warned
    assert (inputs.train.prompts[0].messages is not None) is bool(data.get("apply_chat_template"))
