"""What a worker that scores reports of its engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gkd.scoring import worker
from gkd.scoring.address import Key
from gkd.scoring.worker import ScorerSpec, ScoringWorker
from tests.data.models import save_model


def test_the_size_of_the_cache_is_that_after_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the thread that the engine belongs to may ask it, and that one serves from then on."""
    sizes = [5, 6]
    settings: Any = SimpleNamespace(
        rates=False, engine_class=lambda spec: SimpleNamespace(cache_bytes=lambda: sizes.pop(0))
    )
    monkeypatch.setattr(worker, "ScoringServer", lambda *_, **__: None)
    path = str(save_model(tmp_path, 14))
    scoring = ScoringWorker(
        settings, ScorerSpec("teacher", "float32", path, "cpu", "hash", "127.0.0.1", Key.generate())
    )
    assert [scoring.cache_bytes(), scoring.cache_bytes()] == [5, 5]
