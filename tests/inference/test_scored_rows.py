"""Memory of scoring positions, as it is planned."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch
import torch._dynamo  # which gives frames that are evaluated to its own evaluator a callback
from torch._C._dynamo.eval_frame import set_eval_frame  # type: ignore[import-not-found]
from torch.profiler import profile

from gkd.config.device import Device, EngineLoad
from gkd.inference.scored_rows import RowShape, score_rows, sum_rows
from gkd.inference.torch_scorer import TorchScorer

N, VOCABULARY = 64, 8192


@pytest.fixture(params=[None, False], ids=["plain", "compiler"])
def frames(request: pytest.FixtureRequest) -> Iterator[None]:
    """Frames of Python evaluated as they are without torch.compile and once something was compiled."""
    before = set_eval_frame(request.param)
    yield
    set_eval_frame(before)


@pytest.mark.usefixtures("frames")
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize("k", [0, 1, 8, VOCABULARY - 1, VOCABULARY])
def test_sums_of_rows_give_the_same_scores(k: int, temperature: float, dtype: torch.dtype) -> None:
    """With many ties, as bfloat16 has, rows whose tail is next to nothing, and tokens that are masked."""
    logits = 3 * torch.randn(N, VOCABULARY).to(dtype)
    logits[0, :8] += 200  # what is left of the probability is far below what float32 resolves beside 1
    logits[1, 5:] = -torch.inf
    logits[2] = 0
    tokens, shape = torch.randint(0, 5, (N,)), RowShape(temperature, VOCABULARY, k)
    expected = score_rows(lambda _: logits.clone(), torch.zeros(N, 2), tokens, shape, 1 << 30)
    by_sums = score_rows(lambda _: logits, torch.zeros(N, 2), tokens, shape, 1 << 30, sum_rows)
    assert torch.equal(by_sums.ids, expected.ids)
    torch.testing.assert_close(by_sums.token_logprobs, expected.token_logprobs)
    torch.testing.assert_close(by_sums.logprobs, expected.logprobs)
    assert (by_sums.tails is None) == (k in (0, VOCABULARY))
    torch.testing.assert_close(by_sums.tails, expected.tails, rtol=1e-5, atol=2e-5)
