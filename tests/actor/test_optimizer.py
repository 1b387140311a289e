"""AdamW as a run has it, against torch's loop over parameters and in float64."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from gkd.actor import optimizer as own
from gkd.actor import training
from gkd.actor.loading import load
from gkd.actor.optimizer import HostAdamW, adamw, learning_rate
from gkd.actor.staging import Staging
from gkd.actor.state import move, part_of, put_part
from gkd.actor.training import RankTrainer
from gkd.config import Actor
from gkd.config.compose import compose
from gkd.errors import RunFailed
from tests.actor import models
from tests.families import make as make_family


@pytest.mark.parametrize(
    ("decay", "rates"),
    [
        ("constant", [0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4, 0.4]),
        ("linear", [0.1, 0.2, 0.3, 0.4, 0.4, 0.31, 0.22, 0.13]),
        ("cosine", [0.1, 0.2, 0.3, 0.4, 0.4, 0.3472792206, 0.22, 0.0927207794]),
    ],
)
def test_the_rate_rises_to_its_peak_and_falls_to_a_tenth_of_it_after_the_last_step(
    decay: str, rates: list[float]
) -> None:
    settings = Actor.model_validate({"lr": 0.4, "warmup_steps": 4, "lr_decay": decay})
    assert [learning_rate(settings, step, 8) for step in range(8)] == pytest.approx(rates)
    assert learning_rate(settings, 8, 8) == pytest.approx(0.4 if decay == "constant" else 0.04)
    at_once = settings.model_copy(update={"warmup_steps": 0})
    assert learning_rate(at_once, 0, 8) == pytest.approx(0.4)


def test_a_step_is_made_at_its_own_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.make("llama").save_pretrained(tmp_path)
    settings = ["actor.lr=0.1", "actor.warmup_steps=2", "actor.lr_decay=linear", "trainer.total_steps=4"]
    config, cpu = compose(["+recipe=on_policy_distill", *settings]), torch.device("cpu")
    scored = models.scored(2, models.VOCAB)
    monkeypatch.setattr(training, "fetch_samples", lambda *_: scored)
    samples = [models.on_driver("ref", i, one) for i, one in enumerate(scored)]
    student, n = load(tmp_path), sum(sample.n_sampled for sample in samples)
    optimizer = adamw(student, config.actor)
    trainer = RankTrainer(student, optimizer, Staging(cpu), config, 0, 1, cpu)
    rates = []
    for step in range(1, 5):
        trainer.update(samples, [1.0 / n] * 2, n, step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.055])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fused_step_has_the_trajectory_of_the_loop(dtype: torch.dtype) -> None:
    """Over 30 steps, within the rounding of the type; matrices alone are decayed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.LayerNorm(17), torch.nn.Linear(17, 5)).to(dtype)
    plain, settings = copy.deepcopy(model), Actor(lr=1e-2, weight_decay=0.3)
    fused = adamw(model, settings)
    assert all(group["fused"] for group in fused.param_groups)
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in plain.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    loop = torch.optim.AdamW(groups, lr=1e-2, betas=settings.betas, foreach=False, fused=False)
    for step in range(30):
        rows = torch.randn(8, 33, dtype=dtype, generator=torch.Generator().manual_seed(step))
        for one, optimizer in ((model, fused), (plain, loop)):
            optimizer.zero_grad()
            one(rows).square().sum().backward()
            optimizer.step()
    for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "more", "kept"),
    [("gpt_oss", {}, "mlp.experts.down_proj_bias"), ("cohere", {"use_qk_norm": True}, "self_attn.q_norm.weight")],
)
def test_norms_and_biases_are_not_decayed_however_many_are_one_tensor(
    family: str, more: dict[str, Any], kept: str
) -> None:
    """Those of experts, or of heads, are a row each."""
    config = make_family(family, 0).config
    for name, value in more.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config)
    assert dict(model.named_parameters())[f"model.layers.1.{kept}"].ndim == 2
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
            p.grad = torch.zeros_like(p)
    adamw(model, Actor(lr=1e-2, weight_decay=0.5)).step()
    same = {name for name, p in model.named_parameters() if p.eq(1.0).all()}
    assert same == {name for name, _ in model.named_parameters() if name.endswith(("bias", "norm.weight", "sinks"))}


@pytest.mark.parametrize("size", [1 << 24, 64, 7])
def test_moments_in_the_hosts_memory_change_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit but for where slices cut what a CPU computes at once; also handed on, and after a move."""
    monkeypatch.setattr(own, "SLICE", size)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.LayerNorm(17), torch.nn.Linear(17, 5))
    plain, settings, cpu = copy.deepcopy(model), Actor(lr=1e-2, weight_decay=0.3), torch.device("cpu")
    model[2].bias.requires_grad_(False)
    plain[2].bias.requires_grad_(False)
    expected = adamw(plain, settings)

    def make() -> HostAdamW:
        names = {name for group in expected.param_groups for name in group["param_names"]}
        params = [(name, p) for name, p in model.named_parameters() if name in names]
        groups = [{"params": [(name, p) for name, p in params if (p.ndim > 1) == (decay > 0)], "weight_decay": decay}
                  for decay in (0.3, 0.0)]  # fmt: skip
        return HostAdamW(groups, lr=1e-2, betas=settings.betas, fused=True)

    optimizer = make()
    assert not isinstance(expected, HostAdamW)  # the parameters are on the host themselves
    for step in range(6):
        if step == 3:
            kept, optimizer = part_of(optimizer, cpu, None), make()
            put_part(optimizer, kept)
            moments = [state["exp_avg"] for state in optimizer.state.values()]
            move(model, optimizer, cpu)
            assert all(a is b["exp_avg"] for a, b in zip(moments, optimizer.state.values(), strict=True))
        rows = torch.randn(8, 33, generator=torch.Generator().manual_seed(step))
        for one, its in ((model, optimizer), (plain, expected)):
            its.zero_grad()
            one(rows).square().sum().backward()
            its.step()
    assert own.n_updates(optimizer) == own.n_updates(expected) == 6
    for p, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, other, rtol=0.0 if size > 1000 else 1e-6, atol=0.0 if size > 1000 else 1e-7)


def test_moments_are_on_the_host_where_weights_are_elsewhere() -> None:
    """Of another device and with offload_optimizer alone; there is nothing to move where weights are on the host."""
    settings = Actor(lr=1e-2, offload_optimizer=True)
    optimizer = adamw(torch.nn.Linear(3, 2, device="meta"), settings)
    assert isinstance(optimizer, HostAdamW)
    assert {state[name].device.type for state in optimizer.state.values() for name in own.MOMENTS} == {"cpu"}
    assert not isinstance(adamw(torch.nn.Linear(3, 2, device="meta"), Actor(lr=1e-2)), HostAdamW)
    assert not isinstance(adamw(torch.nn.Linear(3, 2), settings), HostAdamW)


class LazyStream:
    """Work of a device in its order, done when somebody waits; beside that of other streams in any order."""

    random: ClassVar[random.Random]
    all: ClassVar[list[LazyStream]]
    current: ClassVar[LazyStream]

    def __init__(self, *_: object) -> None:
        self.work: list[tuple[Callable[[], bool], Callable[[], object]]] = []
        """What is to be true before something is done, and that."""
        LazyStream.all.append(self)

    def do(self, run: Callable[[], object]) -> None:
        self.work.append((lambda: True, run))

    def record_event(self) -> list[bool]:
        event: list[bool] = []
        self.do(lambda: event.append(True))
        return event

    def wait_event(self, event: list[bool]) -> None:
        self.work.append((lambda: bool(event), lambda: None))

    def wait_stream(self, other: LazyStream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        while self.work:
            stream = LazyStream.random.choice([stream for stream in LazyStream.all if stream.work])
            ready, run = stream.work[0]
            if ready():
                run()
                stream.work.pop(0)

    @classmethod
    @contextmanager
    def enter(cls, stream: LazyStream) -> Iterator[None]:
        before, cls.current = cls.current, stream
        yield
        cls.current = before


@pytest.mark.parametrize("seed", range(20))
def test_slices_wait_for_their_place_on_the_device(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a device does first of what streams leave open: copies of either direction, and what is computed."""
    LazyStream.random, LazyStream.all = random.Random(seed), []
    LazyStream.current = LazyStream()
    at_once, moments, n = torch.Tensor.copy_, list(torch.arange(80.0).clone().split(8)), 8
    expected = [moment + 1 for moment in moments]

    def copy_later(to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        LazyStream.current.do(lambda: at_once(to, source))
        return to

    with monkeypatch.context() as fake:
        fake.setattr(torch.cuda, "Stream", LazyStream)
        fake.setattr(torch.cuda, "stream", LazyStream.enter)
        fake.setattr(torch.cuda, "current_stream", lambda *_: LazyStream.current)
        fake.setattr(torch, "empty", lambda length, device: torch.full((length,), torch.nan))
        fake.setattr(torch.Tensor, "copy_", copy_later)
        transit = own._Transit(torch.device("cuda"), n)
        for moment in moments:
            here = transit.bring([moment, moment[:0]])
            LazyStream.current.do(partial(here[0].add_, 1))
            transit.write_back([moment, moment[:0]], here)
        transit.finish()
    assert all(torch.equal(a, b) for a, b in zip(moments, expected, strict=True))


def test_memory_that_the_host_does_not_pin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    weight: Any = SimpleNamespace(shape=(3, 5), dtype=torch.float32, device=torch.device("cuda"))
    with pytest.raises(RunFailed, match=r"actor\.offload_optimizer.* 60 "):
        own._make_moment(weight)
