"""Adapters on two ranks and on one, and what they write."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
)

from gkd.config import Algorithm
from gkd.types import TrainingSample
from tests.actor import models
from tests.actor.test_lora import base, logits
from tests.ray.actor.ranks import Ranks, call, config, put


def test_two_ranks_one_rank_and_what_they_write(processes: dict[int, Ranks], tmp_path: Path) -> None:
    """The same steps on one rank and on two, away from a reference that is the model without its adapter."""
    base("qwen2 tied").save_pretrained(tmp_path)
    tokenizer(tmp_path)
    settings = config(lora={"r": 4}).model_copy(update={"algorithm": Algorithm.model_validate({"kl": {"coef": 0.1}})})
    groups = [processes[world].become(str(tmp_path), settings) for world in (1, 2)]
    for step in (1, 2):
        batch: list[TrainingSample] = put(models.scored(5, seed=step))
        for ranks in groups:
            ranks.run("compute_logprobs", batch, False, True)
        one, two = (ranks.run("update", batch, step) for ranks in groups)
        assert two == pytest.approx(one, rel=1e-3, abs=1e-6)
        assert (one["actor/kl_reference"] < 1e-6) == (step == 1)
    single, double = (ranks.weights() for ranks in groups)
    for name, value in single.items():
        torch.testing.assert_close(double[name], value, rtol=1e-3, atol=1e-4)
    ray.get([call(w, "state.save", str(tmp_path / "out")) for w in processes[2].workers], timeout=60)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    alone = PeftModel.from_pretrained(base("qwen2 tied"), tmp_path / "out" / "adapter")
    torch.testing.assert_close(logits(merged), logits(alone), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(merged), logits(base("qwen2 tied")), atol=1e-3)
    assert all(torch.equal(merged.state_dict()[name], value) for name, value in double.items())


def tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(models.VOCAB)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(kinds.WordLevel(words, unk_token="t0"))).save_pretrained(path)
