"""What the sampler does around vLLM's engine; the engine itself is in tests/vllm."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gkd.config import load
from gkd.config.device import Device
from gkd.data.model_info import ModelInfo
from gkd.inference import vllm_sampler
from gkd.inference.engine import EngineSpec
from gkd.inference.vllm_logits import Shape
from gkd.inference.vllm_sampler import VLLMSampler
from gkd.weights import vllm_plugin


def test_what_a_pass_under_way_finishes_is_answered_once() -> None:
    """As on a GPU, where two passes are under way when weights come."""
    sampler: Any = object.__new__(VLLMSampler)
    sampler._paused, sampler._finished, sampler._requests, sampler.forward_passes = False, [(1, "one")], {}, 0
    core = SimpleNamespace(batch_queue=["a pass", "another"])

    def step() -> list[Any]:
        if core.batch_queue:
            core.batch_queue.pop()
        return []

    whole = SimpleNamespace(engine_core=core)
    sampler.llm_engine = SimpleNamespace(sleep=lambda **_: None, step=step, engine_core=whole)

    sampler.pause()
    assert sampler.forward_passes == 2 and sampler.step() == [(1, "one")]


@pytest.mark.parametrize(
    ("device", "transfer", "executor"),
    [("cuda", "ipc", "mp"), ("cuda", "nccl", "mp"), ("cuda", "object_store", "uni"), ("cpu", "object_store", "uni")],
)
def test_the_model_runner_on_a_gpu_is_a_process_of_its_own_that_weights_come_to(
    device: Device, transfer: str, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes through the host comes to this process."""
    monkeypatch.setattr(vllm_plugin, "register", lambda: None)  # it imports vLLM
    monkeypatch.setattr(metadata, "entry_points", lambda group: [SimpleNamespace(name="gkd")])
    config = load({"weights": {"transfer": transfer}})
    spec = EngineSpec.for_rollout(config, "path", ModelInfo(96, 128, [2], 96), 64, 0, device)
    assert vllm_sampler._arguments(spec)["distributed_executor_backend"] == executor


def test_logits_are_divided_by_a_temperature_in_float32() -> None:
    """Of bfloat16 they would be rounded once more."""
    model = SimpleNamespace(compute_logits=lambda: torch.tensor([[1.0, 1.015625, 2.0]], dtype=torch.bfloat16))
    for shape in (Shape(temperature=2.0), Shape(temperature=0.7, rows=2)):
        shape.put_on(model)
    logits = model.compute_logits()
    assert logits[0, :2].tolist() == pytest.approx([1 / 0.7, 1.015625 / 0.7], rel=1e-6)
    assert logits[0, 2] == -torch.inf
