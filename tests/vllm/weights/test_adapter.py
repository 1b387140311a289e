"""An adapter that is sent alone: what the engine samples from is what the actor computes, push after push."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gkd.actor.lora import add_adapter, is_adapter, name_in_peft
from gkd.cluster.workers.environment import environment
from gkd.config import Lora
from gkd.types import Sampling
from tests.vllm.inference.test_engines import make, requests, run, small_spec, worst_difference
from tests.vllm.inference.test_in_flight import BEFORE, differences, sampled_across
from tests.weights.received import load_in_buckets

LORA = Lora(r=4, alpha=12.0)  # of a rank that vLLM has no room of exactly


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    os.environ.update(environment("cpu", []))
    from gkd.inference.vllm_sampler import VLLMSampler

    path: Path = tmp_path_factory.mktemp("model")
    make(tied=False, seed=0).save_pretrained(path)
    engine = VLLMSampler(replace(small_spec(str(path)), lora=LORA))
    yield engine
    engine.close()


def trained(version: int) -> Any:
    """The model of which the adapter has learned, in float64: in float32 it is itself as far off as an engine."""
    model = make(tied=False, seed=0)
    add_adapter(model, LORA)
    torch.manual_seed(version)
    for name, parameter in model.named_parameters():
        if is_adapter(name) and version:  # a new one changes nothing
            parameter.data = 0.3 * torch.randn_like(parameter)
    return model.double()


def adapter(model: Any) -> dict[str, Tensor]:
    """What is sent of it."""
    return {name_in_peft(name): t.float() for name, t in model.state_dict().items() if is_adapter(name)}


def test_the_engine_samples_from_the_model_with_the_adapter(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several buckets; before the first push, which nothing may run across, and after two."""
    sample_requests = requests(Sampling(12))
    engine.add(0, sample_requests[0])
    with pytest.raises(RuntimeError, match=r"requests .*adapter"):
        load_in_buckets(engine, adapter(trained(1)).items(), 1)
    while engine.has_unfinished_requests():
        engine.step()
    plain = run(engine, sample_requests)
    assert worst_difference(trained(0), sample_requests, plain) < 1e-4
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for version in (1, 2):
        model = trained(version)
        assert sum(t.nbytes for t in adapter(model).values()) > 20_000  # more than one bucket
        load_in_buckets(engine, adapter(model).items(), version)
        samples = run(engine, sample_requests)
        assert worst_difference(model, sample_requests, samples) < 2e-4
        assert [sample.token_ids.tolist() for sample in samples] != [sample.token_ids.tolist() for sample in plain]
        assert {span.version for sample in samples for span in sample.versions} == {version}
    assert not list(tmp_path.iterdir())  # workers are ended without a word


def test_responses_under_way_go_on_with_the_new_adapter(engine: Any) -> None:
    """Whose tokens are the new model's where what older weights had cached is computed again, and only there."""
    load_in_buckets(engine, adapter(trained(0)).items(), 0)
    for version, keeps in ((1, False), (2, True)):
        engine._salted = keeps
        before, after = trained(version - 1), trained(version)
        *begun, one, other = sampled_across(engine, adapter(after), version)
        for sample in (one, other):  # none of whose tokens was sampled before
            (only,) = sample.versions
            assert only.version == version and differences(after, sample, only).max() < 2e-4
        for sample in begun:
            first, second = sample.versions
            assert (first.version, second.version) == (version - 1, version)
            assert first.stop - first.start == BEFORE and second.stop == len(sample.token_ids)
            assert differences(before, sample, first).max() < 2e-4
            assert (differences(after, sample, second).max() < 2e-4) != keeps


def test_layers_that_vllm_has_no_adapters_for_are_no_success(engine: Any) -> None:
    with pytest.raises(ValueError, match="target modules"):
        load_in_buckets(engine, {"base_model.model.model.nothing.lora_A.weight": torch.ones(4, 8)}.items(), 3)
