import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gkd.config import Loss
from gkd.losses.chunked import chunked
from gkd.losses.position import position_losses
from gkd.losses.targets import PositionTargets

D, V, K = 5, 11, 3


class Head(torch.nn.Linear):
    """An output layer that keeps count of its calls and of the logits of it that are alive."""

    def __init__(self, dtype=torch.float64):
        torch.manual_seed(0)
        super().__init__(D, V, bias=True, dtype=dtype)
        self.rows = []
        self.alive = 0
        self.most_alive = 0

    def forward(self, hidden):
        self.rows.append(len(hidden))
        logits = super().forward(hidden)
        self.alive += len(hidden)
        self.most_alive = max(self.most_alive, self.alive)
        weakref.finalize(logits, self._gone, len(hidden))
        return logits

    def _gone(self, rows):
        self.alive -= rows


def chunked_loss(hidden, head, targets, loss, chunk, weights):
    """The weighted sum of a loss as :mod:`gkd.losses.objective` forms it, and the diagnostics."""

    def of(logits, start):
        found = position_losses(logits, targets.rows(start, start + len(logits)), loss)
        return {"loss": found.loss, **found.diagnostics()}

    values = chunked(hidden, head, of, chunk)
    return (values.pop("loss") * weights).sum(), values


def make_case(n, k=K, dtype=torch.float64):
    generator = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, D, dtype=dtype, generator=generator, requires_grad=True)
    log_p = torch.log_softmax(2 * torch.randn(n, V, generator=generator), -1)
    top, token_ids = log_p.topk(k), torch.randint(V, (n,), generator=generator)
    tail = log_p.scatter(1, top.indices, -torch.inf).logsumexp(1)
    token_logprobs = log_p.gather(1, token_ids[:, None])[:, 0]
    targets = PositionTargets(token_ids, token_logprobs, top.indices.short(), top.values, tail)
    return hidden, targets, torch.rand(n, generator=generator)


NAMES = ["forward_kl", "reverse_kl", "jsd", "sampled_reverse_kl"]


@given(st.integers(1, 12), st.integers(1, 14), st.sampled_from(NAMES), st.sampled_from([K, V]), st.booleans())
@hypothesis_settings(max_examples=30, deadline=None)
def test_chunks_change_neither_value_nor_gradients(n, chunk, name, k, tail):
    hidden, targets, weights = make_case(n, k)
    head, loss = Head(), Loss(name=name, tail=tail, temperature=0.8)
    total, diagnostics = chunked_loss(hidden, head, targets, loss, chunk, weights)
    whole = position_losses(torch.nn.functional.linear(hidden, head.weight, head.bias), targets, loss)
    expected = (whole.loss * weights).sum()
    torch.testing.assert_close(total, expected)
    parameters = (hidden, head.weight, head.bias)
    torch.testing.assert_close(torch.autograd.grad(total, parameters), torch.autograd.grad(expected, parameters))
    assert diagnostics.keys() == whole.diagnostics().keys()
    for key, values in whole.diagnostics().items():
        torch.testing.assert_close(diagnostics[key], values.detach())
        assert not diagnostics[key].requires_grad


@pytest.mark.parametrize("n", [8, 9, 3])
def test_the_head_never_sees_or_keeps_more_than_a_chunk(n):
    hidden, targets, weights = make_case(n)
    head = Head()
    total, _ = chunked_loss(hidden, head, targets, Loss(), 4, weights)
    assert max(head.rows) == min(n, 4) and sum(head.rows) == n
    assert head.alive == 0  # nothing of [N, V] waits for the backward pass
    total.backward()
    assert max(head.rows) == min(n, 4) and sum(head.rows) == 2 * n
    assert head.most_alive == min(n, 4)


def test_no_activation_of_vocabulary_size_is_kept_for_the_backward_pass():
    hidden, targets, weights = make_case(8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(tuple(x.shape)), x)[1], lambda x: x):
        chunked_loss(hidden, Head(), targets, Loss(), 4, weights)
    assert not [shape for shape in kept if V in shape]


def test_metrics_are_not_computed_again_for_the_backward_pass(monkeypatch):
    calls, entr = [], torch.special.entr
    monkeypatch.setattr(torch.special, "entr", lambda x: (calls.append(len(x)), entr(x))[1])
    hidden, targets, weights = make_case(6)
    total, _ = chunked_loss(hidden, Head(), targets, Loss(name="jsd"), 3, weights)
    total.backward()
    assert calls == [3, 3]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [0, K, V])
def test_no_positions_give_zero_that_can_run_backward(name, k):
    hidden, targets, weights = make_case(0, k)
    head = Head()
    total, diagnostics = chunked_loss(hidden, head, targets, Loss(name=name), 4, weights)
    total.backward()
    assert total == 0
    assert hidden.grad.shape == (0, D)
    # Zeros, not None: ranks that have positions wait for this one's share in the reduction.
    assert torch.equal(head.weight.grad, torch.zeros(V, D, dtype=torch.float64))
    assert all(len(value) == 0 for value in diagnostics.values())


def test_low_precision_hidden_states_give_a_float32_sum():
    hidden, targets, weights = make_case(6, dtype=torch.bfloat16)
    head = Head(torch.bfloat16)
    total, diagnostics = chunked_loss(hidden, head, targets, Loss(), 4, weights)
    assert {total.dtype, *(value.dtype for value in diagnostics.values())} == {torch.float32}
    total.backward()
    assert hidden.grad.dtype == head.weight.grad.dtype == torch.bfloat16
    expected = (position_losses(head(hidden).float(), targets, Loss()).loss * weights).sum()
    torch.testing.assert_close(total, expected)


def test_it_measures_without_gradients():
    hidden, targets, weights = make_case(6)
    head = Head()
    with torch.no_grad():
        total, _ = chunked_loss(hidden, head, targets, Loss(), 4, weights)
    assert not total.requires_grad and head.rows == [4, 2]


def test_a_chunk_of_nothing_is_refused():
    hidden, targets, weights = make_case(6)
    with pytest.raises(ValueError, match="chunk is 0"):
        chunked_loss(hidden, Head(), targets, Loss(), 0, weights)
