"""The two ends of an engine over several nodes are the same engine."""

from __future__ import annotations

from typing import Any

import pytest

from gkd.config import Rollout
from gkd.vllm_engine import Follower, Span, engine_arguments
from tests.rollout.test_engines import make

pytestmark = pytest.mark.vllm


class Asked(Exception):
    """vLLM's configuration is about to be made."""


def test_what_is_left_to_vllm_is_left_to_it_alike(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults, such as the tokens of a step, depend on who asks; parts that differ would wait for each other."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    seen: list[tuple[Any, Any]] = []

    def create(arguments: Any, usage_context: Any = None, headless: bool = False) -> None:
        seen.append((arguments, usage_context))
        raise Asked

    make(True, seed=0).save_pretrained(tmp_path)
    monkeypatch.setattr(EngineArgs, "create_engine_config", create)
    pool = Rollout(n_gpus_per_node=1, nnodes=2, tensor_parallel_size=2, across_nodes=True)
    for node_rank, start in enumerate((LLM, lambda **a: Follower(a))):
        span = Span(2, node_rank, "127.0.0.1", 29500)
        with pytest.raises(Asked):
            start(**engine_arguments(str(tmp_path), "cpu", pool, dtype="float32", max_model_len=64, span=span))
    (leading, leads_as), (following, follows_as) = seen
    assert leads_as == follows_as
    told = {name: (value, vars(following)[name]) for name, value in vars(leading).items()}
    assert {name: pair for name, pair in told.items() if pair[0] != pair[1]} == {"node_rank": (0, 1)}
