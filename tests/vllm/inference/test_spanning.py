"""The two ends of an engine over several nodes are the same engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gkd.config import Teacher, load
from gkd.config.device import NodeSpan
from gkd.data.model_info import ModelInfo
from gkd.errors import RunFailed
from gkd.inference.engine import EngineSpec
from gkd.rollout.worker import RolloutWorker, rollout_follower
from gkd.scoring.address import Key
from gkd.scoring.worker import ScorerSpec, ScoringWorker, scoring_follower
from tests.data.models import word_tokenizer
from tests.vllm.inference.test_engines import EOS, N_TOKENS, SHAPE, make

WIDE = {"n_gpus_per_node": 1, "nnodes": 2, "tensor_parallel_size": 2, "across_nodes": True}
Ends = tuple[Callable[..., object], Callable[..., object], tuple[Any, ...]]


def rollout_ends(path: str) -> Ends:
    checkpoint = ModelInfo(SHAPE["vocab_size"], SHAPE["max_position_embeddings"], [EOS], N_TOKENS)
    config = load({"rollout": WIDE, "weights": {"transfer": "object_store"}})
    return RolloutWorker, rollout_follower, (config, EngineSpec.for_rollout(config, path, checkpoint, 64, 0, "cpu"))


def teacher_ends(path: str) -> Ends:
    return (
        ScoringWorker,
        scoring_follower,
        (
            Teacher(**WIDE),
            ScorerSpec("teacher", "float32", path, "cpu", "hash", "127.0.0.1", Key.generate()),
        ),
    )


@pytest.mark.parametrize("ends", [rollout_ends, teacher_ends])
def test_leader_and_follower_ask_vllm_for_the_same(
    ends: Callable[[str], Ends], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what is left to vLLM, such as the tokens of a step: it depends on who asks, and parts that differ hang."""
    from vllm.engine.arg_utils import EngineArgs

    seen: list[tuple[dict[str, Any], Any]] = []

    def create(arguments: Any, usage_context: Any = None, headless: bool = False) -> None:
        seen.append((vars(arguments), usage_context))
        raise RuntimeError("that was all")

    make(True, seed=0).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(EngineArgs, "create_engine_config", create)
    leader, follower, arguments = ends(str(tmp_path))
    for node_rank, start in enumerate((leader, follower)):
        with pytest.raises((RuntimeError, RunFailed), match="was all"):
            start(*arguments, NodeSpan(2, node_rank, "127.0.0.1", 29500))
    (leading, leads_as), (following, follows_as) = seen
    assert leads_as == follows_as
    assert leading["nnodes"] == 2
    assert {name for name, value in leading.items() if value != following[name]} == {"node_rank"}
