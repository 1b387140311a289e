"""What two ranks hand out of the model's files without gathering it, against the same gathered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from gkd.actor.shards import StudentShards
from gkd.actor.worker import ActorWorker
from tests.actor import models
from tests.families import make
from tests.ray.actor.ranks import Ranks, config, put

ODD = 95
"""Rows of the embedding, which two ranks cannot have equal parts of."""


def hand_out(worker: ActorWorker) -> tuple[list[Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Layout, parts and whole tensors of a rank."""
    shards = StudentShards(lambda: worker.trainer.student, torch.bfloat16)
    layout = shards.layout()
    names = [part.name for part in layout]
    parts, whole = ({name: t.clone() for name, t in its} for its in (shards.parts(), shards.gather(names)))
    return layout, parts, whole


def test_equal_shards_go_as_they_are_and_all_else_whole(processes: dict[int, Ranks], tmp_path: Path) -> None:
    """Experts are several tensors in files, and one in memory; what is sharded is cast before it is sent."""
    settings = make("qwen3_moe", 0).config
    settings.vocab_size = ODD
    torch.manual_seed(1)
    type(make("qwen3_moe", 0))(settings).save_pretrained(tmp_path)
    ranks = processes[2].become(str(tmp_path), config())
    (layout, own, whole), (its_layout, others, _) = ray.get(
        [worker.__ray_call__.remote(hand_out) for worker in ranks.workers], timeout=120
    )
    assert layout == its_layout
    assert [part.name for part in layout] == list(own) == list(others) == list(whole)
    for part in layout:
        one, two = own[part.name], others[part.name]
        assert one.dtype == two.dtype == whole[part.name].dtype == part.dtype == torch.bfloat16
        assert tuple(whole[part.name].shape) == part.shape
        if part.dim is None:
            assert torch.equal(one, whole[part.name]) and torch.equal(two, whole[part.name])
        else:
            assert torch.equal(torch.cat([one, two], part.dim), whole[part.name])
    in_one = {part.name for part in layout if part.dim is None}
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= in_one
    assert all(".experts." in name for name in in_one - {"model.embed_tokens.weight", "lm_head.weight"})
    assert len(in_one) < len(layout) / 2 + 10 and any(part.dim == 0 for part in layout)


def set_dtype(ranks: Ranks, dtype: torch.dtype) -> None:
    ray.get([w.__ray_call__.remote(lambda it: setattr(it, "dtype", dtype)) for w in ranks.workers], timeout=120)


def test_routers_are_computed_with_and_sent_in_float32(processes: dict[int, Ranks], tmp_path: Path) -> None:
    """On two ranks, of which each has half of them, as on one that has the whole model."""
    make("ernie4_5_moe", 0).save_pretrained(tmp_path)
    norms, router = [], "model.layers.1.mlp.gate.weight"
    for n in (1, 2):
        set_dtype(processes[n], torch.bfloat16)
        try:
            ranks = processes[n].become(str(tmp_path), config())
        finally:
            set_dtype(processes[n], torch.float32)
        (layout, own, whole), *rest = ray.get([w.__ray_call__.remote(hand_out) for w in ranks.workers], timeout=120)
        norms.append(ranks.run("update", put(models.scored(4)), 1)["actor/grad_norm"])
        exact = {part.name for part in layout if part.dtype == torch.float32}
        assert exact == {
            f"model.layers.1.mlp.{name}" for name in ("gate.weight", "moe_statics.e_score_correction_bias")
        }
        assert all(whole[part.name].dtype == own[part.name].dtype == part.dtype for part in layout)
    ((_, others, _),) = rest
    assert torch.equal(torch.cat([own[router], others[router]]), whole[router])
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


def test_one_rank_has_all_of_each(processes: dict[int, Ranks], tmp_path: Path) -> None:
    make("llama", 3).save_pretrained(tmp_path)
    ranks = processes[1].become(str(tmp_path), config())
    layout, parts, whole = ray.get(ranks.workers[0].__ray_call__.remote(hand_out), timeout=120)
    assert all(part.dim is None for part in layout)
    assert parts.keys() == whole.keys() and all(torch.equal(parts[name], whole[name]) for name in whole)
