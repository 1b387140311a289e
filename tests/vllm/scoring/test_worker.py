"""The worker of the group, around a vLLM engine."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gkd.config import Teacher
from gkd.data.model_info import ModelInfo
from gkd.errors import RunFailed
from gkd.scoring.address import Key
from gkd.scoring.client import Score, TeacherClient, TeacherUnavailable
from tests.vllm.conftest import VLLM_LENGTH


def test_a_worker_serves_until_its_engine_fails(model: Path, vllm_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the Ray host uses it: built, and served on one thread. The engine is the session's."""
    from gkd.inference import vllm_scorer as scoring
    from gkd.scoring.worker import JudgeSpec, TeacherWorker

    closed: list[bool] = []

    class Lent:
        def __init__(self, path: str, checkpoint: ModelInfo, settings: Teacher, device: str, **how: object) -> None:
            assert how == {"dtype": "float32", "sleeps": False, "span": None}
            assert (path, device) == (str(model), "cpu")
            assert (checkpoint.vocabulary, checkpoint.n_tokens, checkpoint.eos_ids) == (96, 96, [2, 95])
            self.limits, self.busy, self.step = vllm_engine.limits, vllm_engine.busy, vllm_engine.step
            self.broken = False

        def add(self, key: int, request: Score) -> None:
            if self.broken:
                raise MemoryError("no room")
            vllm_engine.add(key, request)

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(scoring, "VllmEngine", Lent)
    settings = Teacher(max_model_len=VLLM_LENGTH)
    key = Key.generate()
    worker = TeacherWorker(settings, JudgeSpec("float32", str(model), "cpu", "hash", "127.0.0.1", key))
    failures: list[RunFailed] = []

    def serve_until_it_fails() -> None:
        with pytest.raises(RunFailed) as caught:
            worker.serve()
        failures.append(caught.value)

    thread = threading.Thread(target=serve_until_it_fails)
    thread.start()
    client = TeacherClient([worker.address()], "hash", 3, key=key, max_attempts=1)
    client.connect(10)
    assert client.submit(Score(np.array([5], np.int32), np.array([7, 8], np.int32), 3)).result(20).ids.shape == (2, 3)
    worker._engine.broken = True
    with pytest.raises(TeacherUnavailable):
        client.submit(Score(np.array([5], np.int32), np.array([7, 8], np.int32), 3)).result(20)
    client.close()
    thread.join(5)
    assert not thread.is_alive() and closed == [True]
    assert "MemoryError: no room" in str(failures[0])
