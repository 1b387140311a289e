import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gkd.config import Loss
from gkd.losses.chunked import differentiate_in_chunks, evaluate_in_chunks
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

    def values_at(logits, start):
        result = position_losses(logits, targets.rows(start, start + len(logits)), loss)
        return {"loss": result.loss, **result.diagnostics()}

    def with_share(logits, start):
        values = values_at(logits, start)
        return (values["loss"] * weights[start : start + len(logits)]).sum(), values

    if torch.is_grad_enabled():
        values, gradients = differentiate_in_chunks(hidden, head, with_share, chunk)
        return gradients.attach_to((values.pop("loss") * weights).sum()), values
    values = evaluate_in_chunks(hidden, head, values_at, chunk)
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


def plain_head(bias=True):
    """The output layer that products are worked out for by hand."""
    torch.manual_seed(0)
    return torch.nn.Linear(D, V, bias=bias, dtype=torch.float64)


class Capped(torch.nn.Linear):
    """An output layer whose logits are capped and scaled, with a parameter of its own."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(D, V, bias=True, dtype=torch.float64)
        self.scale = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, hidden):
        return torch.tanh(super().forward(hidden) / 3) * 3 * self.scale


HEADS = {"linear": plain_head, "linear without bias": lambda: plain_head(False), "counting": Head, "capped": Capped}


@given(
    st.integers(1, 12),
    st.integers(1, 14),
    st.integers(1, 40),
    st.sampled_from(NAMES),
    st.sampled_from([K, V]),
    st.booleans(),
    st.sampled_from(sorted(HEADS)),
    st.sampled_from([0.8, 1.0, 1.4]),
)
@hypothesis_settings(max_examples=60)
def test_chunks_change_neither_value_nor_gradients(n, chunk, block, name, k, tail, kind, temperature):
    """Nor do blocks of logits; for a plain output layer, and for one that does more, as autograd of the whole."""
    hidden, targets, weights = make_case(n, k)
    head, loss = HEADS[kind](), Loss(name=name, tail=tail, temperature=temperature)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gkd.losses.divergence.BLOCK_CPU", block)
        total, diagnostics = chunked_loss(hidden, head, targets, loss, chunk, weights)
    whole = position_losses(head(hidden), targets, loss)
    expected = (whole.loss * weights).sum()
    torch.testing.assert_close(total, expected)
    parameters = (hidden, *head.parameters())
    gradients = [torch.autograd.grad(2 * value, parameters) for value in (total, expected)]
    torch.testing.assert_close(*gradients)
    assert diagnostics.keys() == whole.diagnostics().keys()
    for key, values in whole.diagnostics().items():
        torch.testing.assert_close(diagnostics[key], values.detach())
        assert not diagnostics[key].requires_grad


def test_what_is_frozen_gets_no_gradient():
    hidden, targets, weights = make_case(5)
    head = plain_head()
    head.weight.requires_grad_(False)
    total, _ = chunked_loss(hidden, head, targets, Loss(), 2, weights)
    expected = (position_losses(head(hidden), targets, Loss()).loss * weights).sum()
    torch.testing.assert_close(torch.autograd.grad(total, hidden), torch.autograd.grad(expected, hidden))
    total, _ = chunked_loss(hidden.detach(), head, targets, Loss(), 2, weights)
    total.backward()
    assert head.weight.grad is None and head.bias.grad is not None
    total, _ = chunked_loss(hidden.detach(), head.requires_grad_(False), targets, Loss(), 2, weights)
    assert not total.requires_grad


@pytest.mark.parametrize("n", [8, 9, 3])
def test_the_head_sees_every_position_once_and_never_more_than_a_chunk(n):
    hidden, targets, weights = make_case(n)
    head = Head()
    total, _ = chunked_loss(hidden, head, targets, Loss(), 4, weights)
    assert head.alive == 0  # nothing of [N, V] waits for the backward pass
    total.backward()
    assert max(head.rows) == min(n, 4) and sum(head.rows) == n
    assert head.most_alive == min(n, 4)


def test_gradients_are_given_once():
    hidden, targets, weights = make_case(5)
    total, _ = chunked_loss(hidden, plain_head(), targets, Loss(), 2, weights)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        total.backward()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [0, K, V])
@pytest.mark.parametrize("kind", ["linear", "capped"])
def test_no_positions_give_zero_that_can_run_backward(name, k, kind):
    hidden, targets, weights = make_case(0, k)
    head = HEADS[kind]()
    total, diagnostics = chunked_loss(hidden, head, targets, Loss(name=name), 4, weights)
    total.backward()
    assert total == 0
    assert hidden.grad.shape == (0, D)
    # Zeros, not None: ranks that have positions wait for this one's share in the reduction.
    assert torch.equal(head.weight.grad, torch.zeros(V, D, dtype=torch.float64))
    assert all(len(value) == 0 for value in diagnostics.values())


@pytest.mark.parametrize("head", [Head(torch.bfloat16), torch.nn.Linear(D, V, dtype=torch.bfloat16)], ids=str)
def test_low_precision_hidden_states_give_a_float32_sum(head):
    hidden, targets, weights = make_case(6, dtype=torch.bfloat16)
    with torch.no_grad():
        expected_rows = head(hidden)
    total, diagnostics = chunked_loss(hidden, head, targets, Loss(), 4, weights)
    assert {total.dtype, *(value.dtype for value in diagnostics.values())} == {torch.float32}
    total.backward()
    assert hidden.grad.dtype == head.weight.grad.dtype == torch.bfloat16
    expected = (position_losses(expected_rows.float(), targets, Loss()).loss * weights).sum()
    torch.testing.assert_close(total, expected)


def test_it_measures_without_gradients():
    hidden, targets, weights = make_case(6)
    head = Head()
    with torch.no_grad():
        total, _ = chunked_loss(hidden, head, targets, Loss(), 4, weights)
    assert not total.requires_grad and head.rows == [4, 2]
