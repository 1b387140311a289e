"""The host never waits for the device between two micro-batches: nothing asks for a number that is computed there."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gkd.actor import training
from gkd.actor.loading import load
from gkd.actor.optimizer import adamw
from gkd.actor.staging import Staging
from gkd.actor.training import RankTrainer
from gkd.config.compose import compose
from gkd.losses import micro_batch
from gkd.losses.divergence import Divergence
from gkd.modeling import attention
from gkd.types import VersionSpan
from tests.actor import models

CPU = torch.device("cpu")
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "item")


class Waits(TorchDispatchMode):
    """Notes where numbers are asked for, or shapes depend on numbers, which a GPU would first have to have computed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, _, overload = func.name().removeprefix("aten::").partition(".")
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        unsized = name == "repeat_interleave" and overload == "Tensor" and (kwargs or {}).get("output_size") is None
        if name.lstrip("_") in WAITS or name in WAITS or by_mask or unsized:
            frames = [f for f in traceback.extract_stack() if "/gkd/" in f.filename or "/tests/" in f.filename]
            self.calls.append(f"{name} in {frames[-2].name}")
        return func(*args, **(kwargs or {}))


def on_the_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """What is computed before anything is on a device, or with another kernel there."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Waits]]:
    monkeypatch.setattr(training, "collate", on_the_host(training.collate))
    monkeypatch.setattr(training, "check_targets", on_the_host(training.check_targets))
    monkeypatch.setattr(training, "mark_stale_tokens", on_the_host(training.mark_stale_tokens))
    # The padding inside of attention is for CPUs; without it nothing that a GPU computes is different.
    plain = attention.packed_attention

    class Opaque(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, module: Any, kwargs: dict[str, Any], *tensors: Any) -> Any:
            ctx.save_for_backward(*tensors)
            ctx.module, ctx.kwargs = module, kwargs
            with _disable_current_modes():
                return plain(module, *tensors, None, **kwargs)[0]

        @staticmethod
        def backward(ctx: Any, slope: Any) -> Any:
            with _disable_current_modes(), torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
                return (
                    None,
                    None,
                    *torch.autograd.grad(plain(ctx.module, *leaves, None, **ctx.kwargs)[0], leaves, slope),
                )

    def opaque(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return Opaque.apply(module, kwargs, query, key, value), None

    attention.AttentionInterface.register(attention.NAME, opaque)

    yield Waits
    attention.AttentionInterface.register(attention.NAME, plain)


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("on_policy_distill", {"algorithm.loss.top_k": 7}),
        ("on_policy_distill", {"algorithm.loss.name": "sampled_reverse_kl", "schedule.max_staleness": 1}),
        ("grpo", {"algorithm.importance_sampling.level": "sequence", "rollout.top_p": 0.9}),
        ("gspo", {"actor.gradient_checkpointing": True}),
        ("distill_and_reward", {"algorithm.policy.sequence_mask_kl": 0.1, "rollout.temperature": 0.7}),
    ],
)
def test_accumulating_asks_for_no_number(
    recipe: str, overrides: dict[str, object], counted: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"actor.max_tokens_per_micro_batch": 40, "actor.loss_chunk": 7, **overrides}
    config = compose([f"+recipe={recipe}", *(f"{name}={json.dumps(value)}" for name, value in values.items())])
    models.make("llama").save_pretrained(tmp_path)
    student = load(tmp_path, config.actor.gradient_checkpointing)
    trainer = RankTrainer(student, adamw(student, config.actor), Staging(CPU), config, 0, 1, CPU)
    scored = models.scored(6, models.VOCAB)
    samples = [models.on_driver("ref", i, one, (-1.0) ** i) for i, one in enumerate(scored)]
    versions = [VersionSpan(s.n_tokens - s.n_sampled, s.n_tokens, 0) for s in samples]
    samples = [replace(s, versions=(one,)) for s, one in zip(samples, versions, strict=True)]
    weights = [1.0 / s.n_sampled for s in samples]
    monkeypatch.setattr(trainer, "_with_reference", lambda _: scored)
    trainer.update(samples, weights, 10, 1)  # of which the optimizer has the number on the device
    with counted() as waits:
        for chunk in (0, 1):
            trainer.accumulate(samples, weights, 10, chunk)
        assert waits.calls == []
        assert sum(float(p.grad.norm()) for p in student.parameters() if p.grad is not None) > 0
    assert len(waits.calls) > 10  # those of the line before


def test_what_goes_to_a_gpu_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which memory, and how, without a GPU: every array of a micro-batch but very large ones."""
    from gkd.losses import targets
    from tests.losses.test_micro_batch import micro_batch as made

    calls: list[tuple[bool, int]] = []

    class Host(torch.Tensor):
        pinned = False

        def pin_memory(self) -> Any:
            copy = self.clone().as_subclass(Host)
            copy.pinned = True
            return copy

        def to(self, device: torch.device, non_blocking: bool = False) -> Any:
            calls.append((self.pinned and non_blocking, self.nbytes))
            return self

    micro = made(models.scored(3))
    tensors = [value for name in micro.__slots__ if isinstance(value := getattr(micro, name), torch.Tensor)]
    assert len(tensors) > 5
    for tensor in tensors:
        micro_batch.send(tensor.as_subclass(Host), torch.device("cuda"))
    assert all(pinned for pinned, _ in calls) and len(calls) == len(tensors)
    monkeypatch.setattr(targets, "MOST_PINNED", tensors[0].nbytes - 1)
    micro_batch.send(tensors[0].as_subclass(Host), torch.device("cuda"))
    assert not calls[-1][0]


def test_the_loss_takes_more_memory_as_long_as_micro_batches_are_large(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until memory ran out, and micro-batches became as small as any GPU holds."""
    config = compose(["+recipe=on_policy_distill", "actor.max_tokens_per_micro_batch=16384"])
    models.make("llama").save_pretrained(tmp_path)
    student = load(tmp_path)
    trainer = RankTrainer(student, adamw(student, config.actor), Staging(CPU), config, 0, 1, CPU)
    scored = models.scored(2, models.VOCAB)
    samples = [models.on_driver("ref", i, one) for i, one in enumerate(scored)]
    monkeypatch.setattr(training, "fetch_samples", lambda *_: scored)
    seen: list[bool] = []

    def block_rows(vocabulary: int, on_cpu: bool, roomy: bool = False) -> int:
        seen.append(roomy)
        return 8

    monkeypatch.setattr(Divergence, "block_rows", staticmethod(block_rows))
    for budget, roomy in ((16384, True), (8192, False)):
        trainer.set_token_budget(budget)
        seen.clear()
        trainer.compute_logprobs(samples, old=True, reference=False)
        trainer.update(samples, [1.0, 1.0], 10, 1)
        assert set(seen) == {roomy}
