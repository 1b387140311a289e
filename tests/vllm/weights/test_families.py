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

import numpy as np
import pytest
import torch
from torch import Tensor

from gkd.actor.model import load
from gkd.data.model_info import ModelInfo
from gkd.inference.vllm_engine import environment
from gkd.inference.vllm_support import why_not_on_a_cpu
from gkd.types import Sampling
from gkd.weights.pieces import buckets
from tests.families import EOS, FAMILIES, N_TOKENS, SHAPE, STATEFUL, make
from tests.vllm.inference.test_engines import requests, run, small_engine, worst_difference

MECHANISMS = {
    "gemma2": "a tied head, soft caps",
    "qwen3_moe": "packed experts, one tensor in memory and many in files",
    "mixtral": "other names in memory than in files",
    "gpt_oss": "experts and sinks that vLLM's model copies by itself",
    "deepseek_v3": "absorbed matrices of latent attention, a bias of the router",
    "falcon_h1": "a state beside attention",
    "olmo2": "vLLM runs transformers' own layers",
}
OWN_WAY = {"deepseek_v2", "deepseek_v3", "apertus"}
"""vLLM on a CPU computes them a little otherwise than transformers, whatever is pushed: compared with a new engine."""

FAIL = {"phimoe": "vLLM runs transformers' own layers and puts experts into them that do not fit"}


@pytest.fixture(scope="module", autouse=True)
def _cpu() -> None:
    os.environ.update(environment("cpu"))


class Engines:
    """Starts engines, one at a time, and takes away what each leaves in the process."""

    def __init__(self) -> None:
        self.running: Any = None

    def __call__(self, path: str, **changed: Any) -> Any:
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory

        from gkd.weights import vllm_plugin

        cleanup_dist_env_and_memory()  # an engine of other tests may have left groups without one for experts
        backend = {"backend": vllm_plugin.register()}
        self.running = LLM(**small_engine(path) | changed, weight_transfer_config=backend)
        return self.running

    def end(self) -> None:
        if self.running is not None:
            self.running.llm_engine.engine_core.shutdown()
        self.running = None
        gc.collect()


@pytest.fixture
def started() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    engines.end()


@pytest.mark.parametrize("family", FAMILIES if os.environ.get("GKD_ALL_FAMILIES") else MECHANISMS)
def test_the_engine_becomes_what_is_pushed(family: str, started: Engines, tmp_path: Path) -> None:
    models = [make(family, seed, apart=True) for seed in range(3)]
    for seed in (0, 2):
        make(family, seed).save_pretrained(tmp_path / str(seed))
    if why_not_on_a_cpu(models[0].config) is not None:
        pytest.skip("refused before it is started")
    if family in FAIL:
        pytest.skip(FAIL[family])
    pushes = [sent(tmp_path / "0", model.state_dict()) for model in models]
    wanted = requests(Sampling(12))
    caching = family not in STATEFUL
    if family in OWN_WAY:
        new = run(engine_of(started(str(tmp_path / "2"), enable_prefix_caching=caching)), wanted)
        started.end()
    engine = engine_of(started(str(tmp_path / "0"), enable_prefix_caching=caching))
    run(engine, wanted)
    for version in (1, 2):
        engine.load_weights(buckets(pushes[version].items(), 20_000), version)
        found = run(engine, wanted)
        if family not in OWN_WAY:
            assert worst_difference(models[version], wanted, found) < 2e-4
        assert worst_difference(models[version - 1], wanted, found) > 0.1  # the old weights would not have passed
    if family in OWN_WAY:
        for a, b in zip(new, found, strict=True):
            assert a.response_ids.tolist() == b.response_ids.tolist()
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


def engine_of(llm: Any) -> Any:
    """A sampling engine around vLLM's."""
    from gkd.inference.vllm import VLLMEngine

    return VLLMEngine(llm, ModelInfo(SHAPE["vocab_size"], SHAPE["max_position_embeddings"], [EOS], N_TOKENS))


def sent(path: Path, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What an actor with these weights hands out."""
    student = load(path)
    student.lm.load_state_dict(state)
    return {name: tensor.clone() for name, tensor in student.file_tensors(torch.float32)}
