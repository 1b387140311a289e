"""Learning from rewards, as whole programs: what a run leaves and that it climbs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.models import save_reward_model

PARTS = {
    "reward/mean", "reward/std", "reward/share/mean", "reward/share/seconds",
    "reward/accuracy/mean", "reward/format/mean", "reward/odd/mean", "reward/odd/failed",
    "reward/reward_model/mean", "reward/reward_model/seconds", "timing_s/reward", "memory/reward_model/process_gb",
    "advantage/mean", "advantage/std", "actor/loss", "actor/policy_loss", "actor/kl_loss", "actor/kl_reference",
    "actor/entropy", "mismatch/kl", "mismatch/is_ratio_mean", "mismatch/is_ratio_max",
}  # fmt: skip
USERS = """
def odd(completion):
    if completion.n_tokens % 7 == 0:
        raise ValueError("seven")
    return 0.1 * (completion.n_tokens % 2)


async def share(group):
    total = sum(completion.n_tokens for completion in group)
    return [completion.n_tokens / total for completion in group]
"""


def _reward_model(directory: Path) -> Callable[[str], float]:
    """Make a small reward model; returns what it says of a text."""
    import torch

    model, tokenizer = save_reward_model(directory)

    def rate(text: str) -> float:
        with torch.no_grad():
            return float(model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, 0])

    return rate


def test_grpo_with_everything_on(start: Any, tmp_path: Path) -> None:
    """A user's reward that sometimes raises, a reference and a reward model on one GPU, two updates a batch."""
    (tmp_path / "mine.py").write_text(USERS)
    model = _reward_model(tmp_path / "reward_model")
    run = start(
        "trainer.total_steps=20", "trainer.batch_size=8", "rollout.n=8", "actor.lr=2e-3", "actor.mini_batch_size=32",
        "algorithm.kl.coef=0.01", "algorithm.dynamic_sampling.max_rounds=3",
        "algorithm.importance_sampling.level=token",
        "reward.functions=[format,accuracy,'mine:odd','mine:share',reward_model]",
        "reward.weights=[1.0,1.0,0.1,0.01,0.01]",
        f"reward_model.model.path={tmp_path / 'reward_model'}", "reward_model.colocate_with=reference",
        "reward.max_failed_share=1", "rollout.engine=hf",
        "reward.format.pattern='^[0-3]'", "trainer.val_every=100", recipe="grpo",
    )  # fmt: skip
    assert run.end(300) == 0, run.text()
    queues = json.loads((run.output / "engines.json").read_text())
    assert [engine["health"] for engine in queues["engines"]] == ["healthy"] and queues["slots"] >= 64
    placement = json.loads((run.output / "placement.json").read_text())
    assert [row["group"] for row in placement] == ["actor", "rollout", "reference", "reward_model"]
    *own, shared = (row["gpu_uuids"][0] for row in placement)
    assert len(set(own)) == 3
    assert shared == own[-1]
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(21))
    for row in rows[1:]:
        assert row.keys() >= PARTS, PARTS - row.keys()
        assert all(math.isfinite(value) for value in row.values())
        assert abs(row["mismatch/kl"]) < 1e-4
        assert abs(row["advantage/mean"]) < 1e-6
        assert row["reward/share/mean"] == pytest.approx(1 / 8)  # of whole groups, so of eight samples
    assert rows[1]["actor/kl_reference"] < 0.01  # after one of its two updates, the student is nearly the reference
    assert rows[-1]["actor/kl_reference"] > 2 * rows[1]["actor/kl_reference"]
    assert abs(rows[1]["reward/format/kl"]) < 1e-3  # before the first update they are the same
    assert max(row.get("reward/format/kl", 0.0) for row in rows[1:]) > 0.01
    first, last = (sum(row["reward/format/mean"] for row in part) / 5 for part in (rows[1:6], rows[-5:]))
    assert last > first + 0.2
    assert "reward mine:odd" in run.text()
    logged = [json.loads(line) for line in (run.output / "samples.jsonl").read_text().splitlines()]
    for sample in logged[:8]:
        assert sample["rewards"]["reward_model"] == pytest.approx(
            model(sample["prompt"] + sample["response"]), abs=1e-4
        )
    summary = json.loads((run.output / "summary.json").read_text())
    own = {f"val/reward/{name}" for name in ("accuracy", "format", "odd", "share", "reward_model", "mean")}
    assert own | {"val/accuracy"} == set(summary["after"]) - {"val/reward/odd/failed"}
    assert own <= set(summary["before"])
    assert summary["after"]["val/reward/accuracy"] == pytest.approx(summary["after"]["val/accuracy"])
    assert summary["after"]["val/reward/format"] > summary["before"]["val/reward/format"]
    assert summary["after"]["val/reward/share"] == 1.0  # of greedy answers, one a prompt
    assert summary["teacher"] == {}


def test_distillation_and_reward_in_one_update(start: Any) -> None:
    """Of adapters beside 4-bit weights, on the one GPU that all groups share."""
    run = start(
        "trainer.total_steps=3", "trainer.batch_size=8", "actor.lora.r=4", "actor.lora.quantize=nf4",
        "actor.offload_optimizer=true", "placement=single_gpu", "rollout.engine=hf", recipe="distill_and_reward",
    )  # fmt: skip
    assert run.end(300) == 0, run.text()
    assert "by token" in run.text()  # 4-bit weights are not computed with alike
    placed = json.loads((run.output / "placement.json").read_text())
    assert [len(row["gpu_uuids"]) for row in placed] == [1, 1, 1]
    assert len({row["gpu_uuids"][0] for row in placed}) == 1
    for row in run.metrics()[1:]:
        assert abs(row["mismatch/kl"]) < 1e-4  # what the engines have is what is trained
    row = run.metrics()[-1]
    assert row["actor/loss"] == pytest.approx(row["distill/loss"] + row["actor/policy_loss"], abs=1e-6)
    assert {"reward/mean", "distill/reverse_kl", "val/reverse_kl", "val/accuracy"} <= row.keys()


def test_the_datas_own_answers_are_learned_from_too(start: Any) -> None:
    """GKD's lambda, with a supervised term, from a student that knows nothing; on one GPU, in turn."""
    run = start(
        "algorithm.on_policy_share=0.5", "algorithm.supervised_weight=0.5", "trainer.total_steps=20",
        "trainer.batch_size=16", "trainer.n_logged_samples=16", "actor.lr=2e-3", "trainer.val_every=100",
        "placement=single_gpu", "cluster.offload=true", "trainer.trackers=[tensorboard]",
    )  # fmt: skip
    assert run.end(300) == 0, run.text()
    rows = run.metrics()
    assert rows[-1]["val/reverse_kl"] < rows[0]["val/reverse_kl"]
    assert rows[20]["actor/supervised_loss"] < rows[1]["actor/supervised_loss"]
    assert abs(rows[20]["mismatch/kl"]) < 1e-4
    logged = [json.loads(line) for line in (run.output / "samples.jsonl").read_text().splitlines()]
    assert "rollout, teacher" in run.text()  # what is not there fails
    assert len(list((run.output / "tensorboard").iterdir())) == 1
    own = [sample for sample in logged if "logprob_mean" not in sample]
    assert len(own) == len(logged) / 2
    assert all(sample["response"] == sample["answer"] for sample in own)


def test_an_adapter_alone_reaches_engines_that_go_on_sampling(start: Any) -> None:
    """Of fresh tokens the engine's log-probabilities are the actor's, after every push."""
    run = start(
        "rollout.engine=vllm", "actor.lora.r=4", "actor.lr=0.01", "weights.adapter_only=true",
        "schedule.max_staleness=1", "schedule.in_flight=true", "trainer.total_steps=8", "trainer.batch_size=8",
        "trainer.val_every=8", "reward.functions=[format]", "reward.format.pattern='^[0-3]'", recipe="grpo",
    )  # fmt: skip
    assert run.end(300) == 0, run.text()
    rows = run.metrics()
    ages = [row["staleness/max"] for row in rows[1:]]
    assert ages[0] == 0 and set(ages) == {0, 1}  # of some that may be sampled ahead the weights come first
    fresh = [row["mismatch/kl"] for row in rows[1:] if "mismatch/kl" in row]
    assert fresh and max(map(abs, fresh)) < 1e-4
    assert sum(row["actor/grad_norm"] for row in rows[1:]) > 0
    assert max(row.get("mismatch/stale_kl", 0.0) for row in rows[1:]) > 1e-4  # the adapter had changed meanwhile
