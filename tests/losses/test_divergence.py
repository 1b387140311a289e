import brute_force
import pytest
import torch
from brute_force import probabilities

from gkd.losses import MIN_LOGPROB
from gkd.losses.forward_kl import ForwardKL
from gkd.losses.jsd import JSD
from gkd.losses.reverse_kl import ReverseKL
from gkd.losses.sampled_reverse_kl import SampledReverseKL

INF = float("inf")
forward_kl, reverse_kl, sampled_reverse_kl = (kind(kind.Config()) for kind in (ForwardKL, ReverseKL, SampledReverseKL))


def jsd(log_p, log_q, beta):
    return JSD(JSD.Config(beta=beta))(log_p, log_q)


def random_logits(seed, *shape, scale=2.0):
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def log_softmax(logits):
    return torch.log_softmax(logits, -1)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_value_and_gradient_equal_the_brute_force_sum(name, beta):
    teacher, student = random_logits(0, 7), random_logits(1, 7).requires_grad_()
    log_p, log_q = log_softmax(teacher), log_softmax(student)
    value = {"forward_kl": forward_kl, "reverse_kl": reverse_kl}.get(name, lambda p, q: jsd(p, q, beta))(log_p, log_q)
    expected = brute_force.divergence(name, probabilities(teacher), probabilities(student), beta)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)
    (gradient,) = torch.autograd.grad(value, student)
    (expected_gradient,) = torch.autograd.grad(expected, student)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-14)


def test_forward_kl_has_the_teacher_first():
    # The student misses half of what the teacher does: forward KL is large, reverse KL is log 2.
    log_p, log_q = torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0 - 1e-9, 1e-9], dtype=torch.float64).log()
    assert forward_kl(log_p, log_q) > 9
    assert reverse_kl(log_p, log_q) == pytest.approx(0.693147, abs=1e-5)


def test_jsd_is_exactly_the_kl_at_each_end():
    log_p, log_q = log_softmax(random_logits(4, 6, 9)), log_softmax(random_logits(5, 6, 9))
    assert torch.equal(jsd(log_p, log_q, 0.0), forward_kl(log_p, log_q))
    assert torch.equal(jsd(log_p, log_q, 1.0), reverse_kl(log_p, log_q))
    assert (jsd(log_p, log_q, 1.0) > 0.1).all()


@pytest.mark.parametrize("epsilon", [1e-3, 1e-5, 1e-7])
def test_jsd_over_its_weight_tends_to_the_kl_at_each_end_in_float32(epsilon):
    log_p, log_q = log_softmax(random_logits(4, 6, 9)), log_softmax(random_logits(5, 6, 9))
    low, high = jsd(log_p.float(), log_q.float(), epsilon), jsd(log_p.float(), log_q.float(), 1 - epsilon)
    # The distance from the limit is of the order of epsilon times the chi-squared divergence (some tens here).
    tolerance = {"rtol": 100 * epsilon + 1e-5, "atol": 0.0}
    torch.testing.assert_close(low.double() / epsilon, forward_kl(log_p, log_q), **tolerance)
    torch.testing.assert_close(high.double() / epsilon, reverse_kl(log_p, log_q), **tolerance)


def test_jsd_weighs_the_teacher_by_beta():
    log_p, log_q = log_softmax(random_logits(6, 9)), log_softmax(random_logits(7, 9))
    torch.testing.assert_close(jsd(log_p, log_q, 0.2), jsd(log_q, log_p, 0.8))
    assert not torch.isclose(jsd(log_p, log_q, 0.2), jsd(log_p, log_q, 0.8))


@pytest.mark.parametrize("beta", [-0.1, 1.1])
def test_jsd_refuses_a_beta_outside_its_range(beta):
    with pytest.raises(ValueError, match="beta"):
        jsd(torch.zeros(1), torch.zeros(1), beta)


@pytest.mark.parametrize(
    "divergence", [forward_kl, reverse_kl, *(lambda p, q, b=b: jsd(p, q, b) for b in (0.0, 0.5, 1.0))]
)
@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.0, -INF], [0.0, -INF]),  # an outcome that neither side allows, such as an exact tail of nothing
        ([0.0, -INF], [-0.5, -0.9327]),  # ... the teacher does not
        ([-0.5, -0.9327], [0.0, -INF]),  # ... the student does not
        ([0.0, -200.0], [-200.0, 0.0]),
    ],
)
def test_impossible_outcomes_give_finite_values_and_gradients(divergence, p, q):
    log_q = torch.tensor(q, requires_grad=True)
    value = divergence(torch.tensor(p), log_q)
    value.backward()
    assert value.isfinite() and -1e-6 < value <= -MIN_LOGPROB
    assert log_q.grad.isfinite().all()
    if p == q:
        assert value == 0


def test_an_outcome_below_the_bound_pulls_nothing():
    """Its value is that of the bound, whatever it is, and so its gradient is 0."""
    log_q = torch.tensor([-0.7, 2 * MIN_LOGPROB], requires_grad=True)
    forward_kl(torch.tensor([0.5, 0.5]).log(), log_q).backward()
    assert log_q.grad.tolist() == [-0.5, 0.0]


def test_jsd_is_known_to_lose_accuracy_with_old_samples_only_where_it_is_reverse_kl():
    stalest = [JSD(JSD.Config(beta=beta)).max_staleness for beta in (0.0, 0.5, 1.0)]
    assert stalest == [None, None, reverse_kl.max_staleness] and stalest[-1] is not None


def test_partial_forward_kl_has_gradient_mass_times_q_minus_p():
    # verl's gkd recipe had Q - P here, which is right only where the top K holds all of the teacher's mass.
    log_p = log_softmax(random_logits(8, 10))[:4]
    student = random_logits(9, 10).requires_grad_()
    forward_kl(log_p, log_softmax(student)[:4]).backward()
    p = torch.cat([log_p.exp(), torch.zeros(6, dtype=torch.float64)])
    mass, q = p.sum(), torch.softmax(student.detach(), -1)
    assert mass < 0.9
    torch.testing.assert_close(student.grad, mass * q - p)


def test_sampled_reverse_kl_is_the_k1_estimate():
    log_q, log_p = torch.tensor([-1.0, -3.0], requires_grad=True), torch.tensor([-2.0, -0.5])
    value = sampled_reverse_kl(log_p, log_q)
    assert value.tolist() == [1.0, -2.5]
    value.sum().backward()  # -advantage * d log q, the advantage held constant
    assert log_q.grad.tolist() == [1.0, -2.5]


def test_sampled_reverse_kl_in_expectation_is_reverse_kl_in_value_and_gradient():
    log_p, student = log_softmax(random_logits(10, 12)), random_logits(11, 12).requires_grad_()
    log_q = log_softmax(student)
    # Every token of the vocabulary once, weighted by how often the student samples it.
    expectation = (log_q.exp().detach() * sampled_reverse_kl(log_p, log_q)).sum()
    exact = brute_force.kl(probabilities(student), list(log_p.exp()))
    torch.testing.assert_close(expectation, exact)
    torch.testing.assert_close(*(torch.autograd.grad(x, student, retain_graph=True)[0] for x in (expectation, exact)))
