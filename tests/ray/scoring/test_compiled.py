"""The torch engine with layers and sums as graphs, as on a GPU, without a C compiler: the scores of one without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo import config
from torch._dynamo.utils import counters

from gkd.inference import torch_scorer
from gkd.inference.requests import GenerateRequest
from gkd.inference.torch_scorer import TorchScorer
from gkd.modeling import compiling
from tests.families import make
from tests.inference.test_torch_scorer import mixed, run, spec_of


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    monkeypatch.setattr(compiling, "LEAST_PARAMETERS", 1)
    monkeypatch.setattr(compiling, "find_obstacle", lambda device: None)
    torch.compiler.reset()
    counters.clear()
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # of engines that ran in this process before
    with config.patch(disable=False):
        yield
    torch.compiler.reset()


def test_compiled_scores_are_the_same_for_any_lengths(tmp_path: Path) -> None:
    make("llama", 0).save_pretrained(tmp_path)
    spec = spec_of(tmp_path)
    plain, compiled = TorchScorer(spec), TorchScorer(spec)
    compiled._sums = torch_scorer._compile(compiled.model, replace(spec, device="cuda"))
    graphs = []
    for first in range(3):  # other lengths in every pass
        requests = mixed()[first:]
        for a, b in zip(run(plain, requests), run(compiled, requests), strict=True):
            np.testing.assert_array_equal(b.ids, a.ids)
            np.testing.assert_allclose(b.token_logprobs, a.token_logprobs, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(b.logprobs, a.logprobs, rtol=1e-5, atol=1e-5)
            if a.tail_logprobs is not None:
                np.testing.assert_allclose(b.tail_logprobs, a.tail_logprobs, rtol=1e-4, atol=1e-4)
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[2]  # what changes is seen in the first passes
    prompts = [GenerateRequest(np.arange(3, 9, dtype=np.int32), 5), GenerateRequest(np.arange(2, 5, dtype=np.int32), 7)]
    for a, b in zip(run(plain, prompts), run(compiled, prompts), strict=True):
        np.testing.assert_array_equal(a, b)
    assert counters["stats"]["unique_graphs"] == graphs[2]  # each token would be a graph of its own


def test_eager_engines_and_small_models_are_left_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("llama", 0).save_pretrained(tmp_path)
    engine = TorchScorer(spec_of(tmp_path))
    for device, eager, least in (("cuda", True, 1), ("cpu", False, 1), ("cuda", False, 1 << 30)):
        monkeypatch.setattr(compiling, "LEAST_PARAMETERS", least)
        spec = replace(spec_of(tmp_path, enforce_eager=eager), device=device)
        assert torch_scorer._compile(engine.model, spec) is None
