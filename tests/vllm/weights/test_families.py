"""After a push of entirely other weights vLLM's log-probabilities are the actor's: a family for each way it can fail.

All families of ``tests/families.py`` are tried with ``GKD_ALL_FAMILIES=1``, in some minutes.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gkd.actor.loading import load
from gkd.cluster.workers.environment import environment
from gkd.inference.vllm_models import find_cpu_obstacle, find_obstacle
from gkd.types import Sampling
from tests.families import FAMILIES, STATEFUL, make
from tests.vllm.inference.test_engines import requests, run, small_spec, worst_difference
from tests.weights.received import load_in_buckets

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


@pytest.fixture(scope="module", autouse=True)
def _cpu() -> None:
    os.environ.update(environment("cpu", []))


class Engines:
    """Starts engines, one at a time, and takes away what each leaves in the process."""

    def __init__(self) -> None:
        self.running: Any = None

    def __call__(self, path: Path, stateful: bool) -> Any:
        from vllm.distributed import cleanup_dist_env_and_memory

        from gkd.inference.vllm_sampler import VLLMSampler

        cleanup_dist_env_and_memory()  # an engine of other tests may have left groups without one for experts
        self.running = VLLMSampler(small_spec(str(path), stateful=stateful))
        return self.running

    def end(self) -> None:
        if self.running is not None:
            self.running.close()
        self.running = None
        gc.collect()


@pytest.fixture(autouse=True)
def _transformers_as_it_was(family: str) -> Iterator[None]:
    """vLLM changes classes of transformers where it runs a model by them, and other tests need those as they were."""
    module = sys.modules[type(make(family, seed=0)).__module__]
    classes = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    before = [(kind, kind.__bases__, dict(vars(kind))) for kind in classes]
    yield
    for kind, bases, attributes in before:
        if kind.__bases__ != bases:
            kind.__bases__ = bases
        for name in set(vars(kind)) - set(attributes):
            delattr(kind, name)
        for name, value in attributes.items():
            if vars(kind)[name] is not value and not name.startswith("__dict"):
                setattr(kind, name, value)


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
    if find_obstacle(models[0].config) or find_cpu_obstacle(models[0].config):
        pytest.skip("refused before it is started")
    pushes = [sent(tmp_path / "0", model.state_dict()) for model in models]
    sample_requests = requests(Sampling(12))
    if family in OWN_WAY:
        new = run(started(tmp_path / "2", family in STATEFUL), sample_requests)
        started.end()
    engine = started(tmp_path / "0", family in STATEFUL)
    run(engine, sample_requests)
    for version in (1, 2):
        load_in_buckets(engine, pushes[version].items(), version)
        samples = run(engine, sample_requests)
        if family not in OWN_WAY:
            assert worst_difference(models[version], sample_requests, samples) < 2e-4
        assert (
            worst_difference(models[version - 1], sample_requests, samples) > 0.1
        )  # the old weights would not have passed
    if family in OWN_WAY:
        for a, b in zip(new, samples, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


def sent(path: Path, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What an actor with these weights hands out."""
    student = load(path)
    student.lm.load_state_dict(state)
    return {name: tensor.clone() for name, tensor in student.file_tensors(torch.float32)}
