"""Kernels that run on GPUs alone, by Triton's interpreter: tests/e2e/gpu/test_interpreted.py runs these tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gkd.actor.compiling import use_liger
from gkd.config import Rollout
from gkd.inference.vllm_spans import SpanLogprobs
from gkd.losses.truncation import find_least_kept
from tests.actor import models

ON_A_GPU: Any = SimpleNamespace(type="cuda")  # what the student's device is taken for


@pytest.mark.parametrize("family", ["llama", "qwen2 tied", "mistral sliding window"])
def test_ligers_layers_are_transformers(family: str) -> None:
    """Logits and gradients, with positions that begin anew in the middle of a row, as packed ones do."""
    plain, ligers = models.make(family), models.make(family)
    ids = torch.randint(models.VOCAB, (2, 13), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(8), torch.arange(5)]).expand(2, -1)

    def run(student: Any) -> torch.Tensor:
        logits: torch.Tensor = student(input_ids=ids, position_ids=positions).logits
        logits.log_softmax(-1)[..., 3].sum().backward()  # type: ignore[no-untyped-call]
        return logits.detach()

    expected = run(plain)  # before Liger changes what a whole family does
    use_liger(ligers, ON_A_GPU)
    assert "liger" in ligers.model.norm.forward.__func__.__module__
    torch.testing.assert_close(run(ligers), expected, rtol=1e-4, atol=1e-5)
    for (name, its), own in zip(plain.named_parameters(), ligers.parameters(), strict=True):
        assert its.grad is not None and own.grad is not None, name
        torch.testing.assert_close(own.grad, its.grad, rtol=1e-3, atol=1e-4 * float(its.grad.abs().max()), msg=name)


TRUNCATIONS = [{"top_k": 5}, {"top_p": 0.7}, {"top_p": 0.95}, {"top_k": 50, "top_p": 0.9}]


@pytest.mark.parametrize("how", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_vllm_leaves_the_tokens_that_the_trainer_does(how: dict[str, Any], scale: float) -> None:
    """But for one at the edge of top_p, where sums in another order round to either side."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_triton

    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0)) * scale
    rollout = Rollout(**how)
    k = None if rollout.top_k is None else torch.full((5,), rollout.top_k, dtype=torch.int32)
    p = None if rollout.top_p == 1.0 else torch.full((5,), rollout.top_p)
    left = apply_top_k_top_p_triton(logits.clone(), k, p) > -torch.inf
    log_q = logits.log_softmax(-1)
    own = log_q >= find_least_kept(log_q, rollout)
    assert 1 < own.sum(-1).max() < 1000
    assert ((left != own).sum(-1) <= (rollout.top_p < 1.0)).all()


def test_prompts_are_scored_by_the_part_for_gpus(vllm_engine: Any) -> None:
    """Of which the tests of scoring are then run."""
    core = vllm_engine.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    assert isinstance(runner.prompt_logprobs_worker, SpanLogprobs) and core.batch_queue is not None
