"""Which models' logits are what a linear layer gives, and gradients through those and others against transformers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gkd.actor.collate import collate
from gkd.actor.loading import load
from gkd.config import Algorithm, Lora, Rollout
from gkd.losses.objective import objective
from gkd.modeling.head import Head
from tests.actor import models
from tests.families import make


@pytest.mark.parametrize(
    ("family", "plain"),
    [("llama", True), ("mixtral", True), ("gpt_neox", True), ("gemma2", False), ("granite", False), ("cohere", False)],
)
def test_a_head_is_plain_where_nothing_is_done_to_logits(family: str, plain: bool, tmp_path: Path) -> None:
    make(family, seed=0).save_pretrained(tmp_path)
    student = load(tmp_path)
    layer = student.head.linear(torch.randn(3, student.lm.config.hidden_size))
    assert (layer is student.lm.get_output_embeddings()) if plain else (layer is None)


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        *itertools.product(["llama", "qwen2 tied", "gpt2", "gemma2"], [None, Lora(r=2)]),
        ("llama", Lora(r=2, target_modules=["q_proj", "lm_head"])),  # whose head is its own
    ],
)
def test_gradients_are_those_of_the_whole_model_under_autograd(family: str, lora: Lora | None, tmp_path: Path) -> None:
    """Plain, tied and capped heads; frozen ones, and ones with an adapter of their own."""
    models.make(family).save_pretrained(tmp_path)
    student = load(tmp_path, lora=lora)
    trained = {name: p for name, p in student.lm.named_parameters() if p.requires_grad}
    scored = models.scored(3)
    micro = collate(scored, models.VOCAB, [0.3, 0.5, 0.2], [1.0, -1.0, 0.5])
    algorithm = Algorithm.model_validate({"name": "on_policy_distill", "loss": {"name": "jsd"}, "reward_weight": 0.3})
    total, _ = student(micro, objective(micro, algorithm, Rollout(n=2), chunk=4))
    gradients = torch.autograd.grad(total, list(trained.values()))
    student.lm.set_attn_implementation("eager")
    expected = torch.zeros(())
    for sample, weight, advantage in zip(scored, (0.3, 0.5, 0.2), (1.0, -1.0, 0.5), strict=True):
        ids, n = torch.from_numpy(sample.sample.token_ids).long(), len(sample.sample.sampled_ids)
        log_q = student.lm(ids[None]).logits[0, -n - 1 : -1].log_softmax(-1)
        assert sample.teacher is not None
        p = torch.from_numpy(sample.teacher.logprobs).exp()
        p = torch.zeros_like(p).scatter(-1, torch.from_numpy(sample.teacher.ids).long(), p)
        q, m = log_q.exp(), (p + log_q.exp()) / 2
        jsd = (p * (p / m).log() + q * (q / m).log()).sum() / 2
        policy = -advantage * log_q.gather(-1, ids[-n:, None]).sum()
        expected = expected + weight * (jsd + 0.3 * policy)
    for name, gradient, whole in zip(
        trained, gradients, torch.autograd.grad(expected, list(trained.values())), strict=True
    ):
        torch.testing.assert_close(gradient, whole, rtol=1e-3, atol=2e-5, msg=name)


class Halved(LlamaForCausalLM):
    """Does something to its logits where they lie."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits.mul_(0.5)
        return output


@pytest.mark.parametrize(("kind", "plain"), [(LlamaForCausalLM, True), (Halved, False)])
def test_a_head_is_not_plain_where_logits_are_changed_in_place(kind: type[LlamaForCausalLM], plain: bool) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    lm = kind(LlamaConfig(**shape, vocab_size=40))
    assert (Head(lm).linear(torch.randn(3, 32)) is not None) == plain
