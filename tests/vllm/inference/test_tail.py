"""Tails in vLLM's model runner for GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gkd.inference.tail import tail_logprobs, tails_instead_of_ranks, tails_of
from tests.inference.test_tail import Rows, peaked, take_apart


def test_the_model_runner_for_gpus_keeps_tails_over_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own loop over chunks of a prompt, on a CPU, around a function in place of the one that needs Triton."""
    from vllm.v1.worker.gpu.sample import prompt_logprob

    monkeypatch.setattr(prompt_logprob, "compute_topk_scores", take_apart)
    monkeypatch.setattr(prompt_logprob, "CHUNK_SIZE", 16)
    worker = SimpleNamespace(model_runner=SimpleNamespace(sampler=object()))
    for _ in range(2):  # the second engine of a process changes nothing any more
        tails_instead_of_ranks(worker)
    logits = peaked(50, 200, 22.0).float()
    ids, scores, ranks = prompt_logprob.compute_prompt_logprobs_with_chunking(
        torch.zeros(50, dtype=torch.int64), logits, lambda hidden: hidden, 5
    )
    torch.testing.assert_close(tails_of(Rows(ids, scores, ranks)), tail_logprobs(logits, logits.topk(5).indices))
