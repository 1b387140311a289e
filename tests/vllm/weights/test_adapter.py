"""An adapter that is sent alone: what the engine samples from is what the actor computes, push after push."""

from __future__ import annotations

import os
import tempfile
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gkd.actor.lora import add_adapter, is_adapter, name_in_peft
from gkd.cluster.workers.environment import environment
from gkd.config import Lora
from gkd.types import Sampling
from tests.vllm.inference.test_engines import make, requests, run, small_spec, worst_difference
from tests.weights.received import load_in_buckets


def test_the_engine_samples_from_the_model_with_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank that vLLM has no room of exactly, in several buckets; before the first push and after two."""
    os.environ.update(environment("cpu", []))
    from gkd.inference.vllm_sampler import VLLMSampler

    model, lora, sample_requests = make(tied=False, seed=0), Lora(r=4, alpha=12.0), requests(Sampling(12))
    model.save_pretrained(tmp_path)
    engine: Any = VLLMSampler(replace(small_spec(str(tmp_path)), lora=lora))
    add_adapter(model, lora)
    assert (
        worst_difference(model, sample_requests, run(engine, sample_requests)) < 1e-4
    )  # a new adapter changes nothing
    plain = [sample.token_ids.tolist() for sample in run(engine, sample_requests)]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    for version in (1, 2):
        torch.manual_seed(version)
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.data = 0.3 * torch.randn_like(parameter)
        adapter = {name_in_peft(name): t for name, t in model.state_dict().items() if is_adapter(name)}
        assert sum(t.nbytes for t in adapter.values()) > 20_000  # more than one bucket
        load_in_buckets(engine, adapter.items(), version)
        samples = run(engine, sample_requests)
        exact = deepcopy(model).double()  # in float32 the model itself is as far from it
        assert worst_difference(exact, sample_requests, samples) < 2e-4
        assert [sample.token_ids.tolist() for sample in samples] != plain
        assert {span.version for sample in samples for span in sample.versions} == {version}
    assert not list(temporary.iterdir())  # workers are ended without a word
    with pytest.raises(ValueError, match="target modules"):
        load_in_buckets(engine, {"base_model.model.model.nothing.lora_A.weight": torch.ones(4, 8)}.items(), 3)
    engine.close()
