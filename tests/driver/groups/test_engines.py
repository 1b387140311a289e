"""What an engine that is started again is built from; its worker is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import gkd.driver.groups.engines
from gkd.config import load
from gkd.data.model_info import ModelInfo
from gkd.driver.groups.engines import RolloutEngines
from gkd.inference.engine import EngineSpec
from gkd.inference.vllm_lifecycle import GIB, engine_arguments
from tests.weights.reports import reports

SIZES = [5 * GIB, 6 * GIB]


@pytest.mark.parametrize(("gpu", "size"), [("GPU-1", SIZES[1]), ("GPU-7", None)], ids=["on its GPU", "on another one"])
def test_an_engine_that_is_started_again_has_the_cache_of_before(
    gpu: str, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would measure beside an actor at work is not what it may have; another GPU may be smaller."""
    built: list[EngineSpec] = []
    worker = SimpleNamespace(
        reports=reports("rollout", gpu),
        submit_build=lambda target, arguments, environment: built.append(arguments[0][1]),
        control=lambda *_, **__: None,
    )
    leaders = SimpleNamespace(reports=reports("rollout", "GPU-0", "GPU-1"), control=lambda *_, **__: SIZES)
    engines: Any = SimpleNamespace(leaders=leaders, start_again=lambda *_: worker, nnodes=1)
    inputs: Any = SimpleNamespace(student="model", model=ModelInfo(1, 1, [], 1), max_length=64)
    placement: Any = SimpleNamespace(session=SimpleNamespace(threads=[]))
    scorers: Any = SimpleNamespace(list_absent_replicas=lambda: [])
    monkeypatch.setattr(gkd.driver.groups.engines, "gather", lambda *_: None)
    monkeypatch.setattr(RolloutEngines, "_environment", {})
    policy = RolloutEngines(load({}), inputs, placement, engines).make_restart_policy({}, scorers)
    policy.start(1)
    assert [spec.cache_bytes for spec in built] == [size]


def test_a_cache_of_a_known_size_is_not_measured() -> None:
    def spec(**rollout: Any) -> EngineSpec:
        return EngineSpec(
            "rollout",
            "model",
            ModelInfo(1, 1, [], 1),
            load({"rollout": rollout}).rollout,
            "cuda",
            "bfloat16",
            cache_bytes=SIZES[0],
        )

    assert engine_arguments(spec())["kv_cache_memory_bytes"] == SIZES[0]
    assert engine_arguments(spec())["gpu_memory_utilization"] < 0.05  # others may have taken what was free
    assert engine_arguments(spec())["language_model_only"]  # what prepares images would need a tokenizer
    assert engine_arguments(spec(kv_cache_gb=2))["kv_cache_memory_bytes"] == 2 * GIB
