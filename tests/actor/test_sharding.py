"""The student sharded over one rank, in this process, computing in another type than its parameters have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gkd.actor.model import Student, load, shard
from gkd.actor.packing import MicroBatch
from gkd.algorithms.objective import objective
from gkd.config import Algorithm, Rollout
from tests.actor import models
from tests.actor.test_packing import micro_batch


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    models.make("qwen2 tied").save_pretrained(tmp_path)
    return tmp_path


def test_what_the_loss_is_made_of_stays_in_float32(
    mesh: DeviceMesh, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = load(path)
    shard(student, mesh, torch.bfloat16)
    micro, seen, plain = micro_batch(models.scored(3)), [], Student.hidden

    def hidden(self: Student, given: MicroBatch) -> Tensor:
        seen.append(given)
        found = plain(self, given)
        assert found.dtype == torch.bfloat16
        return found

    monkeypatch.setattr(Student, "hidden", hidden)
    student(micro, objective(micro, Algorithm(), Rollout(n=2), 100))[0].backward()
    (given,) = seen
    assert given.weights.dtype == given.sampler_logprobs.dtype == torch.float32
    assert given.targets is not None
    assert given.targets.logprobs.dtype == torch.float32
