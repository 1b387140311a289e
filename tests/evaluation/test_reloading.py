"""Checkpoints of a run that goes on, which deletes some of them before their turn comes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor

from gkd.cli.evaluate import compose_evaluation
from gkd.evaluation import run
from gkd.evaluation.plan import START
from gkd.evaluation.reloading import FurtherWeights, WeightsDeleted
from gkd.evaluation.strategies import Reply
from tests.data.models import save_model


class Engines:
    """In the place of engines, with their client: reply at once, whatever the weights."""

    in_flight, rollout, started = 1, None, 0

    def __init__(self, _: Any, model: Any, rollout: Any, max_length: int) -> None:
        self.model, self.max_length = model, max_length

    async def reply(self, *_: Any) -> Reply:
        return Reply("b", 1, False)

    async def work(self) -> None:
        await asyncio.sleep(3600)


def test_a_checkpoint_that_its_run_deleted_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where it would have been the first that the engines read, which are not started once more."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    model = save_model(tmp_path / "model")

    def start(own: Any, config: Any, model: Any, max_length: int) -> Engines:
        Engines.started += 1
        return Engines(config, model, None, max_length)

    def read_deleted() -> Iterator[tuple[str, Tensor]]:
        raise WeightsDeleted("gone")

    monkeypatch.setattr(Engines, "started", 0)
    monkeypatch.setattr(run, "connect", lambda _: nullcontext(SimpleNamespace(directory=tmp_path)))
    monkeypatch.setattr(run._EvaluationEngines, "_start", start)
    monkeypatch.setattr(run, "EngineReplies", Engines)
    monkeypatch.setattr(run, "load_weights", lambda weights, *_: weights.read())

    def measure(*deleted: str) -> list[str]:
        reads = {name: read_deleted if name in deleted else lambda: iter(()) for name in ("step_1", "step_2", "step_3")}
        further = [FurtherWeights(name, name, read) for name, read in reads.items()]
        sets = f"evaluate.sets.own={{files:[{tmp_path}/a.jsonl],answer_key:answer}}"
        out = f"evaluate.output_dir={tmp_path}/out"
        config = compose_evaluation([f"models.{START}={model}", sets, out, "rollout.engine=hf"])
        return [result.model for result in run.evaluate(config, Console(file=StringIO()), further=further)]

    with caplog.at_level(logging.WARNING, "gkd"):
        assert measure("step_1", "step_3") == [START, "step_2"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{name} is left out: gone" for name in ("step_1", "step_3")
    ]
    assert measure("step_1") == [START, "step_2", "step_3"]
    assert Engines.started == 2
