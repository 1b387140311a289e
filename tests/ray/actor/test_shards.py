"""What two ranks hand out of the model's files without gathering it, against the same gathered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
import torch

from gkd.actor.shards import StudentShards
from gkd.actor.worker import ActorWorker
from tests.families import make
from tests.ray.actor.ranks import Ranks, config

ODD = 95
"""Rows of the embedding, which two ranks cannot have equal parts of."""


def hand_out(worker: ActorWorker) -> tuple[list[Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Layout, parts and whole tensors of a rank."""
    shards = StudentShards(lambda: worker.trainer.student, torch.bfloat16)
    parts, whole = ({name: t.clone() for name, t in its} for its in (shards.parts(), shards.gather()))
    return shards.layout(), parts, whole


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


def test_one_rank_has_all_of_each(processes: dict[int, Ranks], tmp_path: Path) -> None:
    make("llama", 3).save_pretrained(tmp_path)
    ranks = processes[1].become(str(tmp_path), config())
    layout, parts, whole = ray.get(ranks.workers[0].__ray_call__.remote(hand_out), timeout=120)
    assert all(part.dim is None for part in layout)
    assert parts.keys() == whole.keys() and all(torch.equal(parts[name], whole[name]) for name in whole)
