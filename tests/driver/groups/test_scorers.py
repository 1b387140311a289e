"""What the clients of the models that score are made with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gkd.config import Config, load
from gkd.driver.groups.scorers import Scorers
from gkd.driver.inputs.find import Inputs, find_inputs
from gkd.scoring.address import Key
from tests.data.models import WORDS, save_model

ROWS = {"student": 14, "math": 12, "code": 16}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Two teachers of the student's tokenizer, with other numbers of rows that no token has."""
    paths = {name: str(save_model(tmp_path / name, rows)) for name, rows in ROWS.items()}
    rows = [{"prompt": "a b", "teacher": name} for name in ("math", "code")]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load(
        {
            "model": {"path": paths.pop("student")},
            "teacher": {"models": paths, "n_gpus_per_node": 2},
            "data": {"train_files": [str(file)], "val_files": [str(file)], "teacher_key": "teacher"},
            "algorithm": {"loss": {"top_k": None}},
            "rollout": {"engine": "hf"},
        }
    )


def arguments(config: Config, inputs: Inputs, model: str) -> dict[str, object]:
    return Scorers(config, inputs, Key.generate(), {})._arguments(model, ["tcp://127.0.0.1:1"], 1)


def test_teachers_of_different_rows_score_those_that_all_have(config: Config) -> None:
    """So that all give the same K, also where that is the whole vocabulary; each is named in messages."""
    inputs = find_inputs(config, print)
    assert min(ROWS.values()) > len(WORDS)
    for name in ("teacher:math", "teacher:code"):
        made = arguments(config, inputs, name)
        assert (made["vocabulary"], made["scorer"]) == (min(ROWS.values()), name)
    assert arguments(config, inputs, "reference")["vocabulary"] == ROWS["student"]
