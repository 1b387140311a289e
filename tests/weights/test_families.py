"""After a push of entirely other weights vLLM's log-probabilities are the actor's: a family for each way it can fail.

All families of ``tests/families.py`` are tried with ``GKD_ALL_FAMILIES=1``, in some minutes: vLLM takes about ten
seconds for a family that it meets for the first time on a machine, and three afterwards.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gkd.actor.model import load
from gkd.data.checkpoint import Checkpoint
from gkd.sample import Sampling
from gkd.vllm_engine import environment
from gkd.weights.pieces import buckets
from tests.families import EOS, FAMILIES, N_TOKENS, SHAPE, STATEFUL, make
from tests.rollout.test_engines import requests, run, small_engine, worst_difference

pytestmark = pytest.mark.vllm

MECHANISMS = {
    "gemma2": "a tied head, soft caps",
    "qwen3_moe": "packed experts, one tensor in memory and many in files",
    "mixtral": "other names in memory than in files",
    "gpt_oss": "experts and sinks that vLLM's model copies by itself",
    "deepseek_v3": "absorbed matrices of latent attention, a bias of the router",
    "falcon_h1": "a state beside attention",
    "olmo2": "vLLM runs transformers' own layers",
}
NOT_HERE: dict[str, str] = {}
"""Why vLLM on a CPU cannot run it as transformers does, whatever is pushed."""


@pytest.fixture(scope="module", autouse=True)
def _cpu() -> None:
    os.environ.update(environment("cpu"))


@pytest.fixture
def started() -> Iterator[Any]:
    """Starts engines, one at a time, and takes away what each leaves in the process."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from gkd.weights import vllm_plugin

    engines: list[Any] = []

    def start(path: str, **changed: Any) -> Any:
        backend = {"backend": vllm_plugin.register()}
        engines.append(LLM(**small_engine(path) | changed, weight_transfer_config=backend))
        return engines[-1]

    yield start
    for llm in engines:
        llm.llm_engine.engine_core.shutdown()
    engines.clear()
    gc.collect()
    cleanup_dist_env_and_memory()


@pytest.mark.parametrize("family", FAMILIES if os.environ.get("GKD_ALL_FAMILIES") else MECHANISMS)
def test_the_engine_becomes_what_is_pushed(family: str, started: Any, tmp_path: Path) -> None:
    from gkd.rollout.vllm import VLLMEngine

    if family in NOT_HERE:
        pytest.skip(NOT_HERE[family])
    models = [make(family, seed, apart=True) for seed in range(3)]
    make(family, 0).save_pretrained(tmp_path)
    pushes = [sent(tmp_path, model.state_dict()) for model in models]
    llm = started(str(tmp_path), enable_prefix_caching=family not in STATEFUL)
    engine = VLLMEngine(llm, Checkpoint(SHAPE["vocab_size"], SHAPE["max_position_embeddings"], [EOS], N_TOKENS))
    wanted = requests(Sampling(12))
    assert worst_difference(models[0], wanted, run(engine, wanted)) < 2e-4
    for version in (1, 2):
        engine.load_weights(buckets(pushes[version].items(), 20_000), version)
        found = run(engine, wanted)
        assert worst_difference(models[version], wanted, found) < 2e-4
        assert worst_difference(models[version - 1], wanted, found) > 0.1  # the old weights would not have passed


def sent(path: Path, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What an actor with these weights hands out."""
    student = load(path)
    student.lm.load_state_dict(state)
    return {name: tensor.clone() for name, tensor in student.file_tensors(torch.float32)}
