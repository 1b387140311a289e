"""The student sharded over one rank, in this process, computing in another type than its parameters have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gkd.actor.collate import collate
from gkd.actor.loading import load, load_sharded
from gkd.actor.model import Student, shard
from gkd.actor.worker import ActorWorker
from gkd.cluster import host
from gkd.config import Actor, Algorithm, Lora, Rollout
from gkd.config.compose import compose
from gkd.config.device import Device
from gkd.losses.micro_batch import MicroBatch
from gkd.losses.objective import objective
from tests.actor import models
from tests.actor.test_families import samples
from tests.families import make
from tests.losses.test_micro_batch import micro_batch


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
    micro, seen, plain = micro_batch(models.scored(3)), [], Student.compute_hidden

    def compute_hidden(self: Student, batch: MicroBatch) -> Tensor:
        seen.append(batch)
        out = plain(self, batch)
        assert out.dtype == torch.bfloat16
        return out

    monkeypatch.setattr(Student, "compute_hidden", compute_hidden)
    student(micro, objective(micro, Algorithm(), Rollout(n=2), 100))[0].backward()
    (batch,) = seen
    assert batch.weights.dtype == batch.sampler_logprobs.dtype == torch.float32
    assert batch.targets is not None
    assert batch.targets.logprobs.dtype == torch.float32


def test_shards_are_cast_before_they_are_gathered(
    mesh: DeviceMesh, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half the bytes between ranks, and no tensor that is whole and in float32. One rank alone gathers nothing."""
    student = load(path)
    exact = {name: value.clone() for name, value in student.lm.state_dict().items()}
    shard(student, mesh, torch.bfloat16)
    gathered, plain, size = [], DTensor.full_tensor, DeviceMesh.size

    def full_tensor(self: DTensor) -> Tensor:
        gathered.append((self.dtype, self.to_local().device.type))
        with monkeypatch.context() as alone:
            alone.setattr(DeviceMesh, "size", size)
            return plain(self)

    monkeypatch.setattr(DTensor, "full_tensor", full_tensor)
    own = dict(student.gather_full_tensors(torch.bfloat16))
    assert not gathered
    monkeypatch.setattr(DeviceMesh, "size", lambda *_: 2)
    sent = dict(student.gather_full_tensors(torch.bfloat16))
    assert all(torch.equal(value, own[name]) for name, value in sent.items())
    assert len(gathered) == len(sent) > 20
    assert set(gathered) == {(torch.bfloat16, mesh.device_type)}
    assert all(torch.equal(value, exact[name].bfloat16()) for name, value in sent.items())
    trained = dict(student.lm.named_parameters())
    assert {value.dtype for value in trained.values()} == {torch.float32}  # what was cast is a copy


@pytest.mark.parametrize(("device", "frozen"), [("cuda", torch.bfloat16), ("cpu", torch.float32)])
def test_what_is_under_an_adapter_is_as_the_engines_have_it_on_a_gpu(
    device: str, frozen: torch.dtype, mesh: DeviceMesh, path: Path
) -> None:
    """Read as for a GPU; this much of it needs none."""
    student = load(path, lora=Lora(r=4), device=torch.device(device), dtype=torch.bfloat16)
    torch.manual_seed(1)
    kinds: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
    with torch.no_grad():
        for name, parameter in student.lm.named_parameters():
            kinds[parameter.requires_grad].add(parameter.dtype)
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    assert kinds == {True: {torch.float32}, False: {frozen}}
    shard(student, mesh, torch.bfloat16)
    micro = micro_batch(models.scored(3))
    student(micro, objective(micro, Algorithm(), Rollout(n=2), 100))[0].backward()
    gradients = {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
    assert all(".lora_" in name and value.dtype == torch.float32 for name, value in gradients.items())
    assert sum(float(value.norm()) for value in gradients.values()) > 0
    sent = dict(student.gather_full_tensors(torch.bfloat16))
    base, weights = models.make("qwen2 tied").state_dict(), dict(student.lm.named_parameters())
    name = "model.layers.1.mlp.up_proj"
    up, down = (weights[f"{name}.lora_{kind}.default.weight"].to_local() for kind in "BA")
    exact = base[f"{name}.weight"].to(frozen).float() + 2 * up @ down  # added in float32, and rounded once
    assert torch.equal(sent[f"{name}.weight"], exact.bfloat16())


@pytest.mark.parametrize(
    ("device", "world", "ranks_here", "megabytes", "threads"),
    [("cuda", 1, 1, 1, 16), ("cuda", 2, 2, 1, 8), ("cuda", 16, 8, 1, 2), ("cuda", 32, 32, 1, 1), ("cpu", 2, 2, 90, 8),
     ("cpu", 2, 2, 1, 1)]
)  # fmt: skip
def test_a_rank_computes_with_its_share_of_the_nodes_cores(
    device: Device, world: int, ranks_here: int, megabytes: int, threads: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whatever OMP_NUM_THREADS says: the optimizer of offload_optimizer is the host's. A small model takes one.

    Of a machine with 64 cores, of whose time a container has 16.
    """
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(host, "GROUPS", tmp_path)
    (tmp_path / "cpu.max").write_text("1600000 100000")
    config = compose([f"trainer.n_gpus_per_node={ranks_here}", f"trainer.nnodes={world // ranks_here}"])
    try:
        with Path(tmp_path, "model.safetensors").open("wb") as weights:
            weights.truncate(megabytes << 20)
        ActorWorker(config, str(tmp_path), 0, world, device)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_alone_is_sharded_for_offloading_alone(
    mesh: DeviceMesh, path: Path, dtype: torch.dtype, offload: bool
) -> None:
    student = load_sharded(str(path), mesh, torch.device("cpu"), dtype, offload=offload)
    assert isinstance(student, FSDPModule) == offload
    assert (student.copies is not None) == (dtype != torch.float32 and not offload)


def test_a_rank_alone_is_sharded_rather_than_copy_more_than_there_is_room_for(mesh: DeviceMesh, path: Path) -> None:
    numbers = sum(parameter.numel() for parameter in load(path).parameters())
    for most, sharded in ((numbers, False), (numbers - 1, True)):
        student = load_sharded(str(path), mesh, torch.device("cpu"), torch.bfloat16, most_copied=most)
        assert isinstance(student, FSDPModule) == sharded
        assert (student.copies is None) == sharded
    tight, roomy = (Actor(max_tokens_per_micro_batch=tokens) for tokens in (8192, 8193))
    assert tight.most_copied(on_cpu=False) < roomy.most_copied(on_cpu=False) == tight.most_copied(on_cpu=True)


@pytest.mark.parametrize("lora", [None, Lora(r=2, target_modules=["q_proj", "down_proj"])])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_alone_trains_to_the_last_bit_as_if_it_were_sharded(
    mesh: DeviceMesh, path: Path, dtype: torch.dtype, checkpointing: bool, lora: Lora | None
) -> None:
    """Loss, gradients of two micro-batches and their norm; between passes its weights are those that are trained."""
    device, micros = torch.device("cpu"), [micro_batch(models.scored(3, seed=seed)) for seed in range(2)]
    results = []
    for sharded in (False, True):
        torch.manual_seed(0)  # of the adapter
        if sharded:
            student = load(path, checkpointing, lora)
            shard(student, mesh, dtype)
        else:
            student = load_sharded(str(path), mesh, device, dtype, checkpointing, lora)
        before = [p.detach().clone() for p in student.parameters()]
        with student.use_compute_type():
            for micro in micros:
                loss, _ = student(micro, objective(micro, Algorithm(), Rollout(n=2), 100))
                loss.backward()
        trained = [p for p in student.parameters() if p.requires_grad]
        assert all(p.dtype == torch.float32 and p.grad is not None for p in trained)
        assert all(torch.equal(old, new) for old, new in zip(before, student.parameters(), strict=True))
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 0.1)
        results.append([loss, norm, *(p.grad for p in trained)])
    for alone, whole in zip(*results, strict=True):
        assert torch.equal(alone, whole.full_tensor() if isinstance(whole, DTensor) else whole)


@pytest.mark.parametrize("family", ["olmo", "olmo2", "ernie4_5", "mamba", "mamba2"])
def test_shards_compute_in_float32_what_the_model_does(mesh: DeviceMesh, family: str, tmp_path: Path) -> None:
    """Rotary embeddings and residual streams that layers are given in float32, in models that compute in bfloat16."""
    make(family, seed=0).save_pretrained(tmp_path)
    micro = collate(samples(), None, [1.0] * 5, [0.0] * 5)
    logits = []
    for sharded in (False, True):
        if sharded:
            student = load(tmp_path)
            shard(student, mesh, torch.bfloat16)
        else:
            student = load_sharded(str(tmp_path), mesh, torch.device("cpu"), torch.bfloat16)
        with student.use_compute_type(), torch.no_grad():
            logits.append(student(micro, lambda hidden, head: head(hidden)))
    assert torch.equal(*logits)
