import brute_force
import pytest
import torch
from brute_force import outcomes, probabilities
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gkd.config import Loss
from gkd.losses.position import position_losses
from gkd.losses.targets import PositionTargets, check_targets

N, V = 3, 8
DIVERGENCES = [
    {"name": "forward_kl"},
    {"name": "reverse_kl"},
    {"name": "jsd", "beta": 0.0},
    {"name": "jsd", "beta": 0.3},
    {"name": "jsd", "beta": 1.0},
]
ALL_LOSSES = [*DIVERGENCES, {"name": "sampled_reverse_kl"}]


def random_logits(seed, scale=2.0, vocab=V):
    return scale * torch.randn(N, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_targets(teacher, k, temperature=1.0, shuffle=True):
    """The teacher's top k of its logits [N, V] in a shuffled order, and some response tokens."""
    log_p = torch.log_softmax(teacher / temperature, -1)
    ids = log_p.topk(k).indices
    if shuffle:
        ids = ids[:, torch.randperm(k, generator=torch.Generator().manual_seed(5))]
    token_ids = torch.arange(len(teacher)) % teacher.shape[1]
    tail = log_p.scatter(1, ids, -torch.inf).logsumexp(1)
    return PositionTargets(token_ids, log_p.gather(1, token_ids[:, None])[:, 0], ids, log_p.gather(1, ids), tail)


@pytest.mark.parametrize("loss", DIVERGENCES, ids=str)
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("k", [1, 3, V])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_loss_and_gradient_equal_the_brute_force_sum(loss, tail, k, temperature):
    teacher, student = random_logits(0), random_logits(1).requires_grad_()
    targets = make_targets(teacher, k, temperature)
    value = position_losses(student, targets, Loss(**loss, tail=tail, temperature=temperature)).loss
    expected = torch.stack(
        [
            brute_force.divergence(
                loss["name"],
                outcomes(probabilities(teacher[row], temperature), targets.ids[row], tail),
                outcomes(probabilities(student[row], temperature), targets.ids[row], tail),
                loss.get("beta"),
            )
            for row in range(N)
        ]
    )
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-13)
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(value @ weights, student)
    (expected_gradient,) = torch.autograd.grad(expected @ weights, student)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("loss", DIVERGENCES, ids=str)
@pytest.mark.parametrize("tail", [True, False])
def test_gradcheck(loss, tail):
    targets = make_targets(random_logits(2), 3)
    student = random_logits(3).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: position_losses(z, targets, Loss(**loss, tail=tail)).loss, student)


def test_sampled_reverse_kl_compares_the_response_tokens_at_the_temperature():
    teacher, student = random_logits(4), random_logits(5).requires_grad_()
    targets = make_targets(teacher, 0, temperature=0.6)
    result = position_losses(student, targets, Loss(name="sampled_reverse_kl", temperature=0.6))
    p, q = ([probabilities(z[row], 0.6)[row] for row in range(N)] for z in (teacher, student))
    expected = torch.stack([torch.log(y / x) for x, y in zip(p, q, strict=True)])
    torch.testing.assert_close(result.loss, expected)
    (gradient,) = torch.autograd.grad(result.loss.sum(), student)
    log_q = torch.stack([torch.log(y) for y in q])
    (expected_gradient,) = torch.autograd.grad((expected.detach() * log_q).sum(), student)
    torch.testing.assert_close(gradient, expected_gradient)


logit_rows = st.lists(st.floats(-12, 12, width=32), min_size=V, max_size=V)


@given(logit_rows, logit_rows, st.integers(1, V), st.sampled_from(DIVERGENCES))
@hypothesis_settings(max_examples=100)
def test_truncated_loss_lies_between_zero_and_the_full_vocabulary(teacher, student, k, loss):
    # A teacher's tail is known to about machine epsilon, and can be as small as exp(-24) here. Where it is a few
    # epsilon, its logarithm, of about -15, is off by up to a half.
    for dtype, rounding in ((torch.float64, 1e-4), (torch.float32, 8e-2)):
        p, q = torch.tensor([teacher], dtype=dtype), torch.tensor([student], dtype=dtype)
        full = position_losses(q, make_targets(p, V), Loss(**loss)).loss.item()
        truncated = position_losses(q, make_targets(p, k), Loss(**loss, top_k=k)).loss.item()
        assert -1e-6 <= truncated <= full + rounding * full + 1e-6


def test_leaving_the_tail_out_can_be_negative_and_the_tail_bucket_cannot():
    teacher, student = torch.zeros(1, V), torch.tensor([[3.0] + [0.0] * (V - 1)])
    targets = make_targets(teacher, 1, shuffle=False)
    targets = changed(targets, ids=torch.tensor([[0]]))
    assert position_losses(student, targets, Loss(name="forward_kl", tail=False)).loss < -0.1
    assert position_losses(student, targets, Loss(name="forward_kl", tail=True)).loss > 0.1


@pytest.mark.parametrize("loss", DIVERGENCES, ids=str)
def test_all_ids_give_the_full_vocabulary_with_or_without_tail_in_any_order(loss):
    teacher, student = random_logits(6).float(), random_logits(7).float()
    in_order = make_targets(teacher, V, shuffle=False)
    reference = position_losses(student, in_order, Loss(**loss, tail=True)).loss
    for tail in (True, False):
        value = position_losses(student, make_targets(teacher, V), Loss(**loss, tail=tail)).loss
        assert torch.equal(value, reference)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("name", [x["name"] for x in ALL_LOSSES])
def test_diagnostics(name, tail):
    """They do not depend on the loss asked for, and nothing but the loss has a graph."""
    teacher, student = random_logits(8), random_logits(9).requires_grad_()
    targets = make_targets(teacher, 3, temperature=0.7)
    result = position_losses(student, targets, Loss(name=name, tail=tail, temperature=0.7))
    assert result.loss.requires_grad
    assert set(result.diagnostics()) == {
        "forward_kl",
        "reverse_kl",
        "teacher_mass",
        "student_mass",
        "entropy",
        "token_logprobs",
    }
    assert all(value.shape == (N,) and not value.requires_grad for value in result.diagnostics().values())
    for row in range(N):
        p, q = probabilities(teacher[row], 0.7), probabilities(student.detach()[row], 0.7)
        few_p, few_q = outcomes(p, targets.ids[row], True), outcomes(q, targets.ids[row], True)
        torch.testing.assert_close(result.forward_kl[row], brute_force.kl(few_p, few_q))
        torch.testing.assert_close(result.reverse_kl[row], brute_force.kl(few_q, few_p))
        torch.testing.assert_close(result.teacher_mass[row], sum(few_p[:3]))
        torch.testing.assert_close(result.student_mass[row], sum(few_q[:3]))
        torch.testing.assert_close(result.entropy[row], -sum(x * torch.log(x) for x in q))
        at_one = probabilities(student.detach()[row])[int(targets.token_ids[row])]
        torch.testing.assert_close(result.token_logprobs[row], torch.log(at_one))


def test_diagnostics_of_the_full_vocabulary_have_all_the_mass():
    result = position_losses(random_logits(1), make_targets(random_logits(0), V), Loss(name="jsd"))
    torch.testing.assert_close(result.teacher_mass, torch.ones(N, dtype=torch.float64))
    torch.testing.assert_close(result.student_mass, torch.ones(N, dtype=torch.float64))


def test_without_distributions_the_sample_stands_in_and_the_unknown_is_left_out():
    targets = make_targets(random_logits(0), 0)
    result = position_losses(random_logits(1), targets, Loss(name="sampled_reverse_kl"))
    torch.testing.assert_close(result.reverse_kl, result.token_logprobs - targets.teacher_token_logprobs)
    assert set(result.diagnostics()) == {"reverse_kl", "entropy", "token_logprobs"}
    for loss in DIVERGENCES:
        with pytest.raises(ValueError, match="K = 0"):
            position_losses(random_logits(1), targets, Loss(**loss))


@pytest.mark.parametrize("loss", ALL_LOSSES, ids=str)
def test_low_precision_logits_are_computed_in_float32(loss):
    targets = make_targets(random_logits(0).float(), 3)
    logits = random_logits(1).bfloat16().requires_grad_()
    value = position_losses(logits, targets, Loss(**loss)).loss
    assert value.dtype == torch.float32
    assert torch.equal(value, position_losses(logits.float(), targets, Loss(**loss)).loss)
    value.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("loss", ALL_LOSSES, ids=str)
@pytest.mark.parametrize("k", [1, 3, V - 1, V])
@pytest.mark.parametrize("tail", [True, False])
def test_extreme_logits_give_finite_values_and_gradients(loss, k, tail):
    sign = torch.tensor([[1.0, -1, -1, -1, -1, -1, -1, 1], [-1.0] * 7 + [1], [1.0] + [-1.0] * 7])
    for teacher, student in ((100 * sign, -100 * sign), (100 * sign, 100 * sign), (0 * sign, 100 * sign)):
        logits = student.clone().requires_grad_()
        result = position_losses(logits, make_targets(teacher, k), Loss(**loss, tail=tail))
        (gradient,) = torch.autograd.grad(result.loss.sum(), logits)
        assert gradient.isfinite().all()
        for value in (result.loss, *result.diagnostics().values()):
            assert value.isfinite().all()


@pytest.mark.parametrize("loss", DIVERGENCES, ids=str)
def test_a_student_with_more_padded_rows_keeps_them_in_the_tail(loss):
    """The teacher's whole vocabulary leaves it no tail, exactly or by rounding; the student's tail is its padding."""
    teacher, student = random_logits(2).float(), random_logits(3, vocab=V + 4).float()
    student[:, V:] = -40.0
    targets = make_targets(teacher, V)
    logits = student.clone().requires_grad_()
    value = position_losses(logits, targets, Loss(**loss)).loss
    value.sum().backward()
    assert logits.grad.isfinite().all()
    without = position_losses(student[:, :V], targets, Loss(**loss)).loss
    torch.testing.assert_close(value.detach(), without, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("loss", DIVERGENCES, ids=str)
@pytest.mark.parametrize("k", [3, V])
def test_a_token_the_teacher_rules_out_costs_a_finite_amount(loss, k):
    teacher, student = random_logits(2).float(), random_logits(3).float().requires_grad_()
    teacher[:, 0] = -torch.inf
    teacher[:, 2:] = -torch.inf if k == 3 else 0.0  # with k = 3, the top K holds tokens that cannot be
    result = position_losses(student, make_targets(teacher, k), Loss(**loss))
    (gradient,) = torch.autograd.grad(result.loss.sum(), student)
    assert gradient.isfinite().all()
    assert all(value.isfinite().all() for value in (result.loss, result.forward_kl, result.reverse_kl))


def test_a_sampled_token_the_teacher_rules_out_costs_a_finite_amount():
    targets = changed(make_targets(random_logits(0), 0), teacher_token_logprobs=torch.full((N,), -torch.inf))
    result = position_losses(random_logits(1), targets, Loss(name="sampled_reverse_kl"))
    torch.testing.assert_close(result.loss, result.token_logprobs + 1000)
    assert torch.equal(result.reverse_kl, result.loss)


def test_shapes_that_do_not_fit_are_refused():
    targets = make_targets(random_logits(0), 3)
    with pytest.raises(ValueError, match="targets of 3 positions"):
        position_losses(random_logits(1)[:2], targets, Loss())
    with pytest.raises(ValueError, match="2 logits"):
        position_losses(random_logits(1)[:, :2], targets, Loss())
    ids, logprobs, tokens = targets.ids, targets.logprobs, targets.token_ids
    with pytest.raises(ValueError, match="token_ids"):
        PositionTargets(tokens[:2], targets.teacher_token_logprobs, ids, logprobs)
    with pytest.raises(ValueError, match="logprobs"):
        PositionTargets(tokens, targets.teacher_token_logprobs, ids, logprobs[:, :2])


def changed(targets, **change):
    names = ("token_ids", "teacher_token_logprobs", "ids", "logprobs", "tail_logprobs")
    return PositionTargets(**{name: change.get(name, getattr(targets, name)) for name in names})


def test_check_accepts_what_can_be_trained_on():
    for k in (0, 3, V):
        check_targets(V, make_targets(random_logits(0).float(), k))
    check_targets(V + 100, make_targets(random_logits(0), 3))
    check_targets(V, make_targets(random_logits(0), V).rows(0, 0))


def test_check_names_what_cannot_be_trained_on():
    targets = make_targets(random_logits(0), 3)
    highest = int(targets.ids.max())
    with pytest.raises(ValueError, match=rf"token {highest} .*top K .*\b{highest}\b"):
        check_targets(highest, changed(targets, token_ids=torch.zeros(N, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"token 99 .*response"):
        check_targets(V, changed(targets, token_ids=torch.tensor([0, 99, 1])))
    with pytest.raises(ValueError, match=r"token -1 .*teacher"):
        check_targets(V, changed(targets, ids=targets.ids - targets.ids.min() - 1))
    with pytest.raises(ValueError, match=r"top 3 together is 2\.546 at position 0"):  # the likeliest token three times
        check_targets(V, changed(targets, logprobs=targets.logprobs.max(1, keepdim=True).values.expand(-1, 3)))
    with pytest.raises(ValueError, match=r"nan .*position 0"):
        check_targets(V, changed(targets, teacher_token_logprobs=targets.teacher_token_logprobs * torch.nan))
    with pytest.raises(ValueError, match="8 tokens"):
        check_targets(5, make_targets(random_logits(0), V))


@pytest.mark.parametrize("rest", [-19.0, -18.0, -14.0])
@pytest.mark.parametrize("loss", [{"name": "forward_kl"}, {"name": "reverse_kl"}], ids=str)
def test_a_tiny_tail_counts_as_what_it_is(loss, rest):
    """Tails of 3e-8 to 5e-6, where 1 minus the float32 mass of the top K would be anything."""
    teacher = torch.tensor([[3.0, 2.0, 1.0, *[rest] * (V - 3)]], dtype=torch.float64)
    student = torch.tensor([[0.0, 1.0, 2.0, *[-3.0] * (V - 3)]], dtype=torch.float64)
    expected = brute_force.divergence(
        loss["name"],
        outcomes(probabilities(teacher[0]), [0, 1, 2], True),
        outcomes(probabilities(student[0]), [0, 1, 2], True),
        None,
    )
    exact = make_targets(teacher, 3, shuffle=False)
    targets = changed(exact, **{n: getattr(exact, n).float() for n in ("logprobs", "tail_logprobs")})
    assert targets.tail_logprobs.exp().item() == pytest.approx(float(probabilities(teacher[0])[3]) * (V - 3), rel=1e-5)
    value = position_losses(student.float(), targets, Loss(**loss)).loss
    torch.testing.assert_close(value.double(), expected[None], rtol=1e-5, atol=0)
    # Float32 log-probabilities of the top 3 alone leave it open.
    subtracted = torch.log(-torch.expm1(targets.logprobs.double().logsumexp(1)).clamp(max=-1e-30))
    assert rest > -15 or abs((subtracted - targets.tail_logprobs).item()) > 0.05


def test_truncated_targets_without_a_tail_are_refused():
    targets = changed(make_targets(random_logits(0), 3), tail_logprobs=None)
    with pytest.raises(ValueError, match=r"top 3 of 8 .*tail"):
        position_losses(random_logits(1), targets, Loss())
    with pytest.raises(ValueError, match=r"tail_logprobs \(2,\): expected \[3\]"):
        changed(targets, tail_logprobs=torch.zeros(2))
    lost = changed(targets, tail_logprobs=make_targets(random_logits(0), 3).tail_logprobs - 1)
    with pytest.raises(ValueError, match=r"top 3 .*tail .*\b0\.\d+ at position 0"):
        check_targets(V, lost)
