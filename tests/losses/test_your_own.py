"""Losses of the user's own: the files of recipes/your_own, and a surrogate and an algorithm, in a folder elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gkd.config import Config
from gkd.config.compose import compose
from gkd.config.loading import settings
from gkd.config.registry import Registry
from gkd.errors import ConfigError
from gkd.losses.position import position_losses
from gkd.losses.targets import PositionTargets
from gkd.planning.memory.actor import logit_copies
from gkd.rewards.completion import Completion

RECIPE = Path(__file__).parents[2] / "recipes" / "your_own"
N, V = 3, 8
REINFORCE = """
from pydantic import BaseModel
from gkd.algorithms.compositions import Composition
from gkd.losses.surrogate import Surrogate

class Reinforce(Surrogate):
    class Config(BaseModel):
        scale: float = 1.0

    def __call__(self, log_q, ratio, advantages):
        return -self.config.scale * advantages * log_q

    def clips(self, ratio):
        return ratio > 1e9

BY_SEQUENCE = Composition(distils=False, ratio="sequence")
"""
WRONG_SHAPE = """
from gkd.losses.divergence import Divergence

class Summed(Divergence):
    def __call__(self, log_p, log_q):
        return (log_p - log_q).sum()

class Detached(Divergence):
    def __call__(self, log_p, log_q):
        return (log_p - log_q.detach()).sum(-1)

class Nothing(Divergence):
    def __call__(self, log_p, log_q):
        (log_p - log_q).sum(-1)
"""

Run = Callable[..., Config]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Compose settings in a folder with the user's files."""
    for file in RECIPE.glob("*.py"):
        assert len(file.read_text().splitlines()) <= 40
        shutil.copy(file, tmp_path)
    (tmp_path / "policy.py").write_text(REINFORCE)
    (tmp_path / "wrong.py").write_text(WRONG_SHAPE)
    monkeypatch.chdir(tmp_path)
    return lambda *overrides: compose(list(overrides))


def targets(teacher: torch.Tensor, k: int) -> PositionTargets:
    log_p = teacher.log_softmax(-1)
    top, tokens = log_p.topk(k), torch.arange(N)
    tail = log_p.scatter(1, top.indices, -torch.inf).logsumexp(1)
    return PositionTargets(tokens, log_p.gather(1, tokens[:, None])[:, 0], top.indices, top.values, tail)


def test_a_divergence(run: Run, tmp_path: Path) -> None:
    loss = run("algorithm.loss.name=divergence.py:SkewKL", "algorithm.loss.alpha=0.2").algorithm.loss
    assert loss.name == f"{tmp_path}/divergence.py:SkewKL"
    teacher, student = torch.randn(2, N, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    student.requires_grad_()
    value = position_losses(student, targets(teacher, V), loss).loss
    p, q = teacher.softmax(-1), student.softmax(-1)
    expected = (p * (p / (0.2 * p + 0.8 * q)).log()).sum(-1)
    torch.testing.assert_close(value, expected)
    for own, exact in zip(*(torch.autograd.grad(x.sum(), student) for x in (value, expected)), strict=True):
        torch.testing.assert_close(own, exact)
    # Over the teacher's K tokens and the rest, where an outcome may be impossible, it stays finite.
    few = position_losses(student, targets(torch.eye(N, V, dtype=torch.float64) * 1e5, 2), loss).loss
    assert few.isfinite().all() and torch.autograd.grad(few.sum(), student)[0].isfinite().all()


def test_what_it_costs_and_needs_is_asked_of_the_class(run: Run) -> None:
    """One that says nothing is planned with what autograd keeps of it."""
    own = run("algorithm.loss.name=divergence.py:SkewKL")
    assert logit_copies(own, V) == 14 > logit_copies(run("algorithm.loss.name=jsd"), V) == 7
    assert not own.algorithm.weighs_samples and not own.algorithm.loss.compares_tokens_alone


def test_an_advantage_estimator(run: Run) -> None:
    reward = ["+recipe=grpo", "algorithm.advantage.name=advantage.py:FixedBaseline"]
    advantage = run(*reward, "algorithm.advantage.baseline=0.25").algorithm.advantage
    assert advantage.build()([1.0, 1.0, float("nan"), 0.0], [0, 0, 0, 1]).tolist() == [0.75, 0.75, 0.0, -0.25]
    assert np.allclose(run(*reward).algorithm.advantage.build()([1.0], [0]), 0.5)


def test_a_reward(run: Run) -> None:
    kind = Registry("reward.functions", {}).load("reward.py:Brevity")
    lengths = [Completion("", "", None, n_tokens, 64, truncated=False) for n_tokens in (2, 4, 16)]
    assert [kind(kind.Config(target_length=4))(completion) for completion in lengths] == [1.0, 1.0, 0.25]


def test_a_surrogate_and_an_algorithm(run: Run) -> None:
    own = ["algorithm.policy.surrogate=policy.py:Reinforce", "algorithm.policy.scale=2"]
    algorithm = run("+recipe=grpo", "algorithm.name=policy.py:BY_SEQUENCE", *own).algorithm
    assert (algorithm.ratio, algorithm.distils, algorithm.policy_weight) == ("sequence", False, 1.0)
    log_q, advantages = torch.tensor([-1.0, -2.0]), torch.tensor([1.0, -1.0])
    assert algorithm.policy.build((0.2, 0.2))(log_q, log_q.exp(), advantages).tolist() == [2.0, -4.0]
    assert run("+recipe=gspo", "algorithm.policy.ratio=token").algorithm.ratio == "token"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.loss.name=divergence.py:SkewKL", "algorithm.loss.alpha=1"],
            r"algorithm.loss.alpha=1.*less than 1",
        ),
        (
            ["algorithm.loss.name=divergence.py:SkewKL", "algorithm.loss.alhpa=1"],
            r"unknown setting algorithm.loss.alhpa",
        ),
        (
            ["algorithm.loss.name=advantage.py:FixedBaseline"],
            r"algorithm.loss.name=.*divergence.Divergence",
        ),
        (["algorithm.loss.name=none.py:SkewKL"], r"algorithm.loss.name: .*none.py:SkewKL"),
    ],
)
def test_what_does_not_fit_is_one_line(run: Run, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*overrides)


def test_a_loss_that_is_not_one_value_a_position_is_named(run: Run) -> None:
    loss = run("algorithm.loss.name=wrong.py:Summed").algorithm.loss
    with pytest.raises(ValueError, match=r"algorithm.loss.name=.*wrong.py:Summed gives \(\): expected \[3\]"):
        position_losses(torch.zeros(N, V), targets(torch.zeros(N, V), V), loss)


@pytest.mark.parametrize(("name", "message"), [("Detached", "a gradient"), ("Nothing", "NoneType")])
def test_a_loss_that_teaches_nothing_is_named(run: Run, name: str, message: str) -> None:
    """Beside another loss it would be left out of the gradient without a word."""
    loss = run(f"algorithm.loss.name=wrong.py:{name}").algorithm.loss
    logits = torch.zeros(N, V, requires_grad=True)
    with pytest.raises(ValueError, match=rf"algorithm.loss.name=.*wrong.py:{name} .*{message}"):
        position_losses(logits, targets(torch.zeros(N, V), V), loss)


def test_settings_of_built_in_classes_say_whose_they_are() -> None:
    known = settings()
    assert known["algorithm.loss.beta"].startswith("jsd: ")
    assert known["algorithm.advantage.divide_by_std"].startswith("grpo: ")
    assert known["algorithm.policy.clip_high"].startswith("clip, cispo: ")
