"""The worker of the group, around a vLLM engine."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gkd.config import Teacher
from gkd.errors import RunFailed
from gkd.inference.requests import ScoreRequest, ScorerUnavailable
from gkd.scoring.address import Key
from gkd.scoring.client import ScoringClient
from tests.vllm.conftest import VLLM_LENGTH


def test_a_worker_serves_until_its_engine_fails(model: Path, vllm_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the Ray host uses it: built, and served on one thread. The engine is the session's."""
    from gkd.inference import vllm_scorer as scoring
    from gkd.inference.engine import EngineSpec
    from gkd.scoring.worker import ScorerSpec, ScoringWorker

    closed: list[bool] = []

    class Lent:
        can_score = True

        def __init__(self, spec: EngineSpec) -> None:
            assert (spec.dtype, spec.sleeps, spec.span) == ("float32", False, None)
            assert (spec.model_path, spec.device) == (str(model), "cpu")
            assert (spec.model.vocabulary, spec.model.n_tokens, spec.model.eos_ids) == (96, 96, [2, 7, 95])
            self.has_unfinished_requests = vllm_engine.has_unfinished_requests
            self.limits, self.step = vllm_engine.limits, vllm_engine.step
            self.broken = False

        def has_lost_process(self) -> bool:
            return False

        def cache_bytes(self) -> int | None:
            return None

        def add(self, key: int, request: ScoreRequest) -> None:
            if self.broken:
                raise MemoryError("no room")
            vllm_engine.add(key, request)

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(scoring, "VLLMScorer", Lent)
    settings = Teacher(engine="vllm", max_model_len=VLLM_LENGTH)
    key = Key.generate()
    spec = ScorerSpec("teacher", "float32", str(model), "cpu", "hash", "127.0.0.1", key, eos_ids=(7,))
    worker = ScoringWorker(settings, spec)
    failures: list[RunFailed] = []

    def serve_until_it_fails() -> None:
        with pytest.raises(RunFailed) as caught:
            worker.serve()
        failures.append(caught.value)

    thread = threading.Thread(target=serve_until_it_fails)
    thread.start()
    client = ScoringClient([worker.address()], "hash", 3, key=key, max_attempts=1)
    client.connect(30)
    assert client.submit(ScoreRequest(np.array([5, 7, 8], np.int32), ((1, 3),), 3)).result(20).ids.shape == (2, 3)
    worker._engine.broken = True
    with pytest.raises(ScorerUnavailable):
        client.submit(ScoreRequest(np.array([5, 7, 8], np.int32), ((1, 3),), 3)).result(20)
    client.close()
    thread.join(30)
    assert not thread.is_alive() and closed == [True]
    assert "MemoryError: no room" in str(failures[0])
