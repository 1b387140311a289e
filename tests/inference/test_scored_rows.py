"""Memory of scoring positions, as it is planned."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch.profiler import profile

from gkd.config.device import Device, EngineLoad
from gkd.inference.scored_rows import RowShape, score_rows
from gkd.inference.torch_scorer import TorchScorer

N, VOCABULARY = 64, 8192


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("k", [0, 64, VOCABULARY])
def test_the_copies_of_logits_are_counted(k: int, temperature: float, dtype: torch.dtype) -> None:
    """Temporaries of an operation included."""
    logits, ids = torch.randn(N, VOCABULARY).to(dtype), torch.zeros(N, dtype=torch.long)
    with profile(profile_memory=True) as profiled:
        shape = RowShape(temperature, VOCABULARY, k)
        scored = score_rows(lambda hidden: logits[: len(hidden)].clone(), torch.zeros(N, 2), ids, shape, 1 << 30)
    changes = [e.nbytes() for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    results = sum(t.nbytes for t in (scored.token_logprobs, scored.ids, scored.logprobs))
    assert max(accumulate(changes)) - results == pytest.approx(_planned(k, "cpu"), rel=0.05)
    assert _planned(k, "cuda") == _planned(k, "cpu")


def _planned(k: int, device: Device) -> float:
    load = EngineLoad(
        device=device, n_parameters=0, head=0, tied=False, hidden=0, vocabulary=VOCABULARY, dtype_bytes=4, kv_bytes=0,
        pass_bytes=0, n_sequences=1, longest=N, scored=1.0, top_k=k,
    )  # fmt: skip
    return TorchScorer.memory(load)["activations"]
