"""Log-probabilities of some tokens and of all others, against log_softmax under autograd in float64."""

from contextlib import nullcontext

import pytest
import torch

from gkd.losses import MIN_LOGPROB
from gkd.losses.outcomes import Kernels, outcomes, spread, sum_others, use_kernels

INF = float("inf")
N, V = 4, 9


@pytest.fixture(autouse=True, params=["as it is", "fused"])
def _way(request):
    """The kernels as they stand, which compilation does not change; compiled they are in tests/ray/actor."""
    with use_kernels(Kernels(sum_others, spread)) if request.param == "fused" else nullcontext():
        yield


def random_case(k, dtype=torch.float64):
    generator = torch.Generator().manual_seed(k)
    logits = (3 * torch.randn(N, V, dtype=dtype, generator=generator)).requires_grad_()
    ids = torch.stack([torch.randperm(V, generator=generator)[:k] for _ in range(N)])
    return logits, ids


def by_autograd(logits, ids, temperature):
    log_q = torch.log_softmax(logits / temperature, -1)
    others = log_q.scatter(-1, ids, -INF).logsumexp(-1)
    return log_q.gather(-1, ids), others, -(log_q.exp() * log_q).sum(-1)


@pytest.mark.parametrize("k", [0, 1, 4, V - 1])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_are_those_of_autograd(k, temperature):
    logits, ids = random_case(k)
    result, expected = outcomes(logits, ids, temperature), by_autograd(logits, ids, temperature)
    torch.testing.assert_close(tuple(result[:3]), expected)
    log_q = logits / temperature - (result.highest + result.log_sum)[:, None]
    torch.testing.assert_close(log_q, torch.log_softmax(logits / temperature, -1))
    slopes = [torch.randn(value.shape, dtype=torch.float64) for value in expected[:2]]
    gradients = [torch.autograd.grad(values[:2], logits, slopes, retain_graph=True)[0] for values in (result, expected)]
    torch.testing.assert_close(*gradients)
    assert not any(value.requires_grad for value in result[2:])


def test_it_passes_gradcheck():
    logits, ids = random_case(3)
    assert torch.autograd.gradcheck(lambda z: outcomes(z, ids, 0.7)[:2], logits)


def test_what_is_left_is_exact_however_small():
    logits = torch.tensor([[100.0, -100.0, 99.0, -101.0]], requires_grad=True)
    others = outcomes(logits, torch.tensor([[0, 2]])).others
    expected = torch.logsumexp(torch.tensor([-100.0, -101.0]), 0) - torch.logsumexp(torch.tensor([100.0, 99.0]), 0)
    torch.testing.assert_close(others, expected[None])
    others.backward()  # exp(-200) is 0 in float32, the share of each in what is left is not
    share = torch.softmax(torch.tensor([-100.0, -101.0]), 0)
    torch.testing.assert_close(logits.grad[0, [1, 3]], share)
    torch.testing.assert_close(logits.grad[0, [0, 2]], -torch.softmax(torch.tensor([100.0, 99.0]), 0))


def test_impossible_tokens_have_no_nan():
    logits = torch.tensor([[1.0, -INF, 2.0, -INF], [1.0, -INF, 2.0, 0.5]], requires_grad=True)
    result = outcomes(logits, torch.tensor([[0, 2], [0, 2]]))
    others = result.others.clamp(min=MIN_LOGPROB)
    (others.sum() + result.logprobs.sum()).backward()
    assert others[0] == MIN_LOGPROB and others[1] > -3
    assert logits.grad.isfinite().all() and result.entropy.isfinite().all()
    known = torch.softmax(torch.tensor([1.0, 2.0, 0.5]), 0)
    torch.testing.assert_close(result.entropy[1], -(known * known.log()).sum().detach())


@pytest.mark.parametrize("k", [0, 1, 4, V - 1])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_bfloat16_is_rounded_once(k, temperature):
    """Values are those of the float32 of the same logits; the gradient is rounded to bfloat16 at its end."""
    logits, ids = random_case(k, torch.float32)
    half = logits.detach().bfloat16().requires_grad_()
    exact = half.detach().double().requires_grad_()
    result, expected = outcomes(half, ids, temperature), outcomes(exact, ids, temperature)
    before = half.detach().clone()
    torch.testing.assert_close(tuple(result), tuple(value.float() for value in expected), rtol=1e-5, atol=1e-5)
    sum(value.sum() for value in result[:2]).backward()
    sum(value.sum() for value in expected[:2]).backward()
    torch.testing.assert_close(half.grad, exact.grad.bfloat16(), rtol=2**-7, atol=1e-6)
    assert torch.equal(half, before)
