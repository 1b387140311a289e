"""The loss of a micro-batch and TRL's on the same tensors."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gkd.algorithms.aggregation import token_weights
from tests.losses.test_objective import LIMIT, a_batch, loss_and_slope


class _Accelerator:
    """One process: gathering and reducing change nothing."""

    num_processes = 1
    sync_gradients = False

    def gather(self, value: Any) -> Any:
        return value

    gather_for_metrics = gather

    def reduce(self, value: Any, reduction: str) -> Any:
        return value


TRL_CASES = [
    ("grpo", "sequence_mean", "grpo", {}, {}),
    ("grpo", "token_mean", "dapo", {}, {}),
    ("grpo", "constant", "dr_grpo", {}, {}),
    ("grpo", "sequence_mean", "grpo", {"kl": {"coef": 0.2}}, {"beta": 0.2}),
    ("grpo", "token_mean", "dapo", {"kl": {"coef": 0.2}}, {"beta": 0.2}),
    ("gspo", "sequence_mean", "grpo", {}, {"importance_sampling_level": "sequence"}),
    ("grpo", "token_mean", "cispo", {"policy": {"surrogate": "cispo", "clip_high": 0.1}}, {"epsilon_high": 1.1}),
    ("grpo", "token_mean", "dapo", {"policy": {"sequence_mask_kl": 0.3}}, {"off_policy_mask_threshold": 0.3}),
    ("grpo", "token_mean", "dapo", {"importance_sampling": {"level": "token", "cap": 1.3}}, {"use_vllm": True}),
    *((name, how, loss_type, {}, {"left_out": 2} | level) for name, how, loss_type, level in (
        ("grpo", "sequence_mean", "grpo", {}),
        ("grpo", "constant", "dr_grpo", {}),
        ("grpo", "token_mean", "dapo", {}),
        ("gspo", "sequence_mean", "grpo", {"importance_sampling_level": "sequence"}),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "aggregation", "loss_type", "own", "its"), TRL_CASES)
def test_trl_computes_the_same_on_the_same_tensors(
    name: str, aggregation: str, loss_type: str, own: dict[str, Any], its: dict[str, Any]
) -> None:
    """Also where a response that the limit ended is left out (TRL's mask_truncated_completions).

    GSPO's penalty is not compared: TRL weighs it by the response's ratio, which is not what samples call for.
    """
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed (the extra trl)")
    micro, logits = a_batch(seed=7, aggregation=aggregation)
    bounds, its = micro.bounds.tolist(), dict(its)
    lengths = [b - a for a, b in pairwise(bounds)]
    kept = [i != its.get("left_out") for i in range(len(lengths))]
    weights = token_weights(lengths, kept, aggregation, LIMIT)
    micro.weights.copy_(torch.tensor(weights).repeat_interleave(torch.tensor(lengths)))
    log_q = logits.log_softmax(-1).gather(-1, micro.response_ids[:, None])[:, 0]

    def padded(values: torch.Tensor) -> torch.Tensor:
        rows = [torch.nn.functional.pad(values[a:b], (0, max(lengths) - (b - a))) for a, b in pairwise(bounds)]
        return torch.stack(rows)

    mask = padded(torch.ones(len(log_q))) * torch.tensor(kept)[:, None]
    settings = {
        "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "beta": 0.0,
        "loss_type": loss_type, "importance_sampling_level": "token", "epsilon_low": 0.1, "epsilon_high": 0.3,
        "use_vllm": False, "vllm_importance_sampling_correction": True, "max_completion_length": LIMIT,
        "current_gradient_accumulation_steps": 1, "_entropy_bonus_enabled": False, "accelerator": _Accelerator(),
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=True, steps_per_generation=1),
        "model": SimpleNamespace(training=True), "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (padded(log_q), torch.zeros_like(mask), None),
        "get_off_policy_mask": grpo_trainer.GRPOTrainer.get_off_policy_mask,
    }  # fmt: skip
    assert micro.old_logprobs is not None and micro.reference_logprobs is not None
    inputs = {
        "prompt_ids": torch.zeros(len(lengths), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(lengths), 1),
        "completion_ids": padded(micro.response_ids),
        "completion_mask": mask,
        "advantages": padded(micro.advantages)[:, 0],
        "old_per_token_logps": padded(micro.old_logprobs),
        "sampling_per_token_logps": padded(micro.sampler_logprobs),
        "ref_per_token_logps": padded(micro.reference_logprobs),
        "importance_sampling_ratio": padded((micro.old_logprobs - micro.sampler_logprobs).exp()).clamp(max=1.3),
        "num_items_in_batch": mask.sum(),
    }
    theirs = grpo_trainer.GRPOTrainer._compute_loss(SimpleNamespace(**(settings | its)), None, inputs)
    policy = {"clip_low": 0.1, "clip_high": 0.3, **own.get("policy", {})}
    if loss_type == "cispo":
        del policy["clip_low"]
    ours, slope = loss_and_slope(micro, logits, **{"name": name, "aggregation": aggregation, **own, "policy": policy})
    assert ours == pytest.approx(theirs.item(), rel=1e-6)
    torch.testing.assert_close(slope, torch.autograd.grad(theirs, logits)[0], rtol=1e-6, atol=1e-9)
