"""vLLM's trainer engines over an actor's weights, without GPUs: what they are told, and what they call in which order.

Of ``sharded_rdt`` nothing more than this is tried: its servers, RDMA and the engines' end need CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gkd.actor.loading import load
from gkd.actor.shards import StudentShards
from gkd.config import Weights
from gkd.errors import RunFailed
from gkd.weights.delivery import Destination, Push
from gkd.weights.shard_publishing import ShardPublisher
from gkd.weights.shards import FilePart, ShardCall, ShardSource
from gkd.weights.transfer import Bucket
from tests.actor.test_multimodal import make_with_images
from tests.families import make

NAMES = ["embed.weight", "layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "norm.weight", "head.weight"]
SHAPE = (4, 6)


class Source(ShardSource):
    """Weights of rank 0 of two, of which one tensor is not in parts."""

    def layout(self) -> list[FilePart]:
        return [FilePart(name, torch.float32, SHAPE, None if name == "norm.weight" else 0) for name in NAMES]

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((part.name, torch.zeros(4 if part.dim is None else 2, 6)) for part in self.layout())

    def gather(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, torch.full(SHAPE, float(NAMES.index(name)))) for name in names)


@dataclass
class Line:
    """A delivery to engines that write down what they are told; ``fails`` at this call."""

    destinations: list[Destination]
    fails: str = ""
    push: Push = field(default_factory=lambda: Push(1, 5, 20.0))
    buckets: list[Bucket] = field(default_factory=list)
    lost: dict[int, Exception] = field(default_factory=dict)

    def send(self, bucket: Bucket) -> None:
        self.buckets.append(bucket)
        if bucket.contents[0].verb == self.fails:
            self.lost[2] = RuntimeError("out of memory")

    def make_room(self, n: int) -> None:
        assert n == 0  # a call is over when all have answered

    @property
    def calls(self) -> list[ShardCall]:
        return [bucket.contents[0] for bucket in self.buckets]


def line(*engines: int, fails: str = "") -> Line:
    return Line([Destination(engine, f"worker {engine}", 1) for engine in engines], fails)


def test_shards_are_described_as_vllm_has_them() -> None:
    from vllm.distributed.weight_transfer.m2n_common import M2NMesh, resolve_layout, validate_layout

    from gkd.weights.vllm_sources import Shards

    shards = Shards(Source(), 2)
    metas = shards.metadata()
    assert shards.mesh() == M2NMesh((2, 1), 0)
    assert [(meta.name, meta.placements) for meta in metas] == [
        (name, None if name == "norm.weight" else (0, -1)) for name in NAMES
    ]
    for meta, (name, tensor) in zip(metas, shards, strict=True):
        mesh, placements = resolve_layout(shards.mesh(), meta.placements)
        validate_layout(mesh, placements, meta.shape, "source")
        assert (name, tensor.dtype) == (meta.name, meta.dtype)


@pytest.mark.parametrize("family", ["gemma3 with images", "mixtral", "deepseek_v3"])
def test_layers_are_gathered_one_after_the_other_as_vllm_divides_them(family: str, tmp_path: Path) -> None:
    """Where a tower for images has names between those of layers of text, and where experts are converted."""
    from vllm.distributed.weight_transfer.base import layerwise_groups

    from gkd.weights.vllm_sources import GatheredTensors

    model = make_with_images() if family.endswith("images") else make(family, 0)
    model.save_pretrained(tmp_path)
    student = load(tmp_path)
    source = GatheredTensors(StudentShards(lambda: student, torch.float32))
    metas = source.metadata()
    names = [meta.name for meta in metas]
    assert names == [name for group in layerwise_groups(names) for name in group]
    in_file = load_file(tmp_path / "model.safetensors")
    assert in_file.keys() == set(names)
    for meta, (name, tensor) in zip(metas, source, strict=True):
        assert (name, tensor.dtype, tuple(tensor.shape)) == (meta.name, meta.dtype, meta.shape)
        assert torch.equal(tensor, in_file[name])
    files_order = [part.name for part in StudentShards(lambda: student, torch.float32).layout()]
    assert (files_order == names) == (not family.endswith("images"))  # or this would show nothing


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Names that vLLM's trainer engine for RDMA has read, group by group; its server is not started."""
    from vllm.distributed.weight_transfer.sharded_rdt_trainer import ShardedRDTTrainerWeightTransferEngine as Engine

    groups: list[list[str]] = []

    def serve(engine: Any, update_future: Any, live_count: int, live_ids: list[int]) -> None:
        groups.append([str(live_count)])
        for names, tensors in engine.source.iter_groups():
            assert [float(t[0, 0]) for t in tensors] == [NAMES.index(name) for name in names]
            groups.append(names)

    monkeypatch.setattr(Engine, "_spawn_server", lambda engine, names: setattr(engine, "_server_name", "server"))
    monkeypatch.setattr(Engine, "_run_gather_loop", serve)
    monkeypatch.setattr("ray.get_runtime_context", lambda: type("Context", (), {"namespace": "of the run"}))
    return groups


def test_engines_that_fetch_are_called_in_order_and_told_where(read: list[list[str]]) -> None:
    """Two engines of two processes; then one of them alone; then it again."""
    from vllm.distributed.weight_transfer.sharded_rdt_engine import ShardedRDTWeightTransferInitInfo

    publisher = ShardPublisher(Weights(transfer="sharded_rdt", timeout_s=7.0), Source(), span=2)
    both, one, again = line(0, 2), line(2), line(2)
    for its in (both, one, again):
        publisher.send(its)  # type: ignore[arg-type]
    assert [[call.verb for call in its.calls] for its in (both, one, again)] == [
        ["init", "start", "update", "finish"], ["init", "start", "update", "finish"], ["start", "update", "finish"],
    ]  # fmt: skip
    assert [(bucket.version, bucket.number, bucket.last) for bucket in both.buckets] == [
        (5, i, i == 3) for i in range(4)
    ]
    info = ShardedRDTWeightTransferInitInfo(**both.calls[0].info | both.calls[0].place_of(2))
    assert (info.names, info.group_lens) == (NAMES, [1, 2, 2, 2])
    assert set(info.dtype_names) == {"float32"} and info.shapes == [list(SHAPE)] * len(NAMES)
    assert (info.trainer_actor_names, info.trainer_actor_namespace) == (["server"], "of the run")
    assert (info.num_consumers, info.replica_rank, info.num_replicas) == (4, 1, 2)
    assert one.calls[0].place_of(2) == {"replica_rank": 0, "num_replicas": 1}
    groups = [NAMES[:1], NAMES[1:3], NAMES[3:5], NAMES[5:]]
    assert read == [["4"], *groups, ["2"], *groups, ["2"], *groups]  # processes that fetch, then what they do
    assert publisher._engine._init_info.stall_timeout_s == 7.0


@pytest.mark.parametrize("verb", ["init", "start", "update", "finish"])
def test_an_engine_that_fails_ends_the_push_and_is_named(read: list[list[str]], verb: str) -> None:
    publisher = ShardPublisher(Weights(transfer="sharded_rdt"), Source(), span=1)
    with pytest.raises(RunFailed, match=rf"weights version 5, bucket .: engine 2 .*\b{verb}\b.*: .*of memory"):
        publisher.send(line(0, 2, fails=verb))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has NCCL")
def test_a_machine_without_nccl_says_so() -> None:
    publisher = ShardPublisher(Weights(transfer="nccl_m2n"), Source(), span=1)
    with pytest.raises(RunFailed, match=r"weights\.transfer=nccl_m2n: NCCL"):
        publisher.send(line(0))  # type: ignore[arg-type]


def test_what_the_library_cannot_send_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anybody is met: it takes tensors of one to three dimensions."""
    from gkd.weights.nccl_m2n import NcclM2n

    class Deep(Source):
        def layout(self) -> list[FilePart]:
            return [FilePart("conv.weight", torch.float32, (2, 2, 2, 2), 0)]

    monkeypatch.setattr(NcclM2n, "new_address", lambda: "A" * 171 + "=")
    monkeypatch.setattr("gkd.weights.nccl_m2n.join_apart", torch.no_grad)
    monkeypatch.setattr("vllm.distributed.weight_transfer.m2n_trainer.import_m2n", lambda: None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    publisher = ShardPublisher(Weights(transfer="nccl_m2n"), Deep(), span=1)
    with pytest.raises(RunFailed, match=r"weights.transfer=nccl_m2n: parameter 'conv.weight' has rank 4") as caught:
        publisher.send(line(0))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
