"""Memory of a push at both ends: what a real sender holds, measured, and the rest by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gkd.config import Weights
from gkd.config.device import PushLoad
from gkd.errors import ConfigError
from gkd.planning.memory.actor import MicroBatchSize, Training, peak_items
from gkd.planning.memory.colocation import all_memory
from gkd.planning.memory.pools import pool_memory
from gkd.planning.memory.push import count_received_bytes, count_sent_bytes, push_load
from gkd.planning.shapes import shape_of
from gkd.planning.sizes import shape_of_size
from gkd.weights.nccl_m2n import NcclM2n
from gkd.weights.object_store import ObjectStore
from gkd.weights.packing import PackedLayout, PackedTransfer, PackingSender
from gkd.weights.publishing import Publisher
from gkd.weights.sharded_rdt import ShardedRdt
from gkd.weights.transfer import Bucket, Receiver
from tests.planning.layouts import QWEN3_30B, layout_of
from tests.planning.tensor_bytes import TensorBytes

MIB = 1 << 20
H100 = ("+recipe=grpo", "plan.gpu_type=h100-80gb")


class Here(PackingSender):
    """Packs on a CPU."""

    def pack(self, tensors: dict[str, Tensor], bucket: Bucket) -> PackedLayout:
        """Return the layout of the buffer."""
        return self.pack_buffer(tensors)


class Packed(PackedTransfer):
    """A way of packed buckets whose sender is on a CPU."""

    sender, receiver = Here, Receiver


@pytest.mark.parametrize(
    ("root", "sizes", "n_pieces", "adds"),
    [
        (0, [200_000] * 30, 1, False),  # several a bucket
        (0, [3_000_000] * 6, 1, False),  # each larger than one
        (3_000_000, [100_000] * 20, 1, False),  # embeddings that are
        (0, [100_000] * 3, 1, False),  # all in one
        (0, [400_000] * 12, 1, True),  # with an adapter, which is added in float32
        (0, [2_000_000] * 4, 8, False),  # experts, which are gathered together
    ],
)
def test_what_a_sender_holds_is_near_the_measured_peak(root: int, sizes: list[int], n_pieces: int, adds: bool) -> None:
    def gather() -> Iterator[tuple[str, Tensor]]:
        for i, n in enumerate([root] * (root > 0) + sizes):
            whole = torch.ones(n, dtype=torch.bfloat16)
            if adds:
                whole = (whole + torch.ones(n, dtype=torch.float32)).bfloat16()
            yield from ((f"{i}.{number}", piece) for number, piece in enumerate(whole.chunk(n_pieces)))

    publisher = Publisher(Weights(transfer=f"{__name__}:Packed", bucket_mb=1), torch.device("cpu"), gather)
    tensors = TensorBytes()
    with tensors:
        bucket = publisher.pack(1, 0, True)
        while not bucket.last:
            bucket = publisher.pack(1, bucket.number + 1, True)
    whole = 2.0 * max(sizes)
    gathered = 5 * whole if adds else whole
    load = PushLoad(2 * (root + sum(sizes)), MIB, 2 * root, whole / n_pieces, whole, gathered, layer=0, module=0)
    assert 0.95 * tensors.peak <= Packed.count_sent_bytes(load) <= 1.4 * tensors.peak


def test_what_an_engine_holds_of_new_weights() -> None:
    """By hand, in bfloat16: of a small model two buckets of 512 MiB and gate and up projection, of a large vocabulary
    the head alone, of Qwen3-30B-A3B a layer's experts in their buckets; what they are loaded into is the engine's part.
    Through the host the module alone, or the head.
    """
    layout = layout_of(*H100, "model.size=0.5b", "placement=single_gpu")  # by ipc
    experts, module = 2 * 128 * 3 * 768 * 2048, 2 * 2 * 896 * 4864
    small, head = 2 * shape_of_size("0.5b").n_parameters, 2 * 152_064 * 3584
    for size, tp, bucket_mb, expected, by_host in (
        ("0.5b", 1, 512, small + module, 2 * 2 * 151_936 * 896),
        ("0.5b", 1, 64, 2 * 151_936 * 896 * 2, 2 * 2 * 151_936 * 896),
        ("7b", 1, 512, 2 * head, 2 * head),
        ("7b", 4, 128, head * (1 + 1 / 4), head * (1 + 1 / 4)),
        ("30b-a3b", 4, 512, experts + 512 * MIB + experts / 4, experts * (1 + 1 / 4)),
    ):
        student = shape_of(QWEN3_30B) if size == "30b-a3b" else shape_of_size(size)
        config = layout.config.with_settings({"weights.bucket_mb": bucket_mb})
        sized = replace(layout, config=config, models=replace(layout.models, student=student))
        assert count_received_bytes(sized, tp) == pytest.approx(expected)
        assert ObjectStore.count_received_bytes(push_load(sized, tp)) == pytest.approx(by_host)
    pool = layout.config.rollout
    assert pool_memory(layout, "rollout", pool).items["weights being received"] == count_received_bytes(layout, 1)


def test_what_ways_without_buckets_hold() -> None:
    """By hand, of 7 billion parameters: shards of a module together, and two layers that are fetched, or the head."""
    load = push_load(layout_of(*H100, "model.size=7b", "plan.nodes=[8]"), 2)
    module, head, layer = 2 * 2 * 3584 * 18_944, 2 * 152_064 * 3584, 2 * shape_of_size("7b").largest_layer
    assert module < head
    assert NcclM2n.count_received_bytes(load) == head * (1 + 1 / 2)
    assert NcclM2n.count_sent_bytes(load) == head
    assert ShardedRdt.count_sent_bytes(load) == layer + max(layer, head)


def test_what_a_rank_gathers() -> None:
    """By hand: with an adapter a weight, what is added and the sum, in float32; experts, which have none, alone."""
    dense, sparse = layout_of(*H100, "model.size=7b"), layout_of(*H100, "model.size=7b", "actor.lora.r=16")
    assert push_load(dense, 1).gathered == 2 * 3584 * 18_944
    assert push_load(sparse, 1).gathered == (2 + 2 * 4) * 3584 * 18_944
    load = push_load(replace(sparse, models=replace(sparse.models, student=shape_of(QWEN3_30B))), 1)
    assert load.whole == 2 * 128 * 2 * 768 * 2048
    assert load.tensor < load.whole
    assert load.gathered == max(2 * 128 * 3 * 768 * 2048, (2 + 2 * 4) * 2048 * 32 * 128)
    alone = push_load(layout_of(*H100, "model.size=7b", "actor.lora.r=16", "weights.adapter_only=true"), 1)
    assert alone.gathered == (2 + 4) * 16 * 18_944


def test_an_adapter_alone_is_small() -> None:
    whole, alone = (
        layout_of(
            *H100, "model.size=7b", "actor.lora.r=16", "weights.transfer=object_store", f"weights.adapter_only={x}"
        )
        for x in ("false", "true")
    )
    assert count_sent_bytes(alone) < 0.01 * count_sent_bytes(whole)
    assert count_received_bytes(alone, 1) == 0


def test_an_actor_may_need_most_while_it_sends() -> None:
    """A quantized student and small micro-batches leave less to compute with than a push takes."""
    layout = layout_of(
        *H100, "model.size=7b", "placement=single_gpu", "actor.lora.r=16", "actor.lora.quantize=nf4",
        "actor.gradient_checkpointing=true", "actor.max_tokens_per_micro_batch=256", "actor.loss_chunk=64",
        "data.max_prompt_length=128", "rollout.max_response_length=128",
    )  # fmt: skip
    training = Training(layout.config, 1, 2, on_cpu=False)
    micro, sent = MicroBatchSize(256, 128), count_sent_bytes(layout)
    before = peak_items(layout.models.student, training, micro)
    items = peak_items(layout.models.student, training, micro, sent)
    assert items["weights being sent"] == sent
    assert "gradients" not in items
    assert sum(items.values()) > sum(before.values())
    assert pool_memory(layout, "actor", layout.config.trainer).items["weights being sent"] == sent
    moments = Training(layout.config.with_settings({"actor.offload_optimizer": True}), 1, 2, on_cpu=False)
    assert "optimizer state" not in peak_items(layout.models.student, moments, micro, 1e12)


def test_what_is_sent_is_beside_the_engines_weights_where_groups_have_a_gpu_in_turn() -> None:
    eight = (*H100, "trainer.n_gpus_per_node=8", "rollout.n_gpus_per_node=8", "rollout.colocate_with=actor",
             "model.size=14b", "rollout.gpu_memory_utilization=0.8", "actor.max_tokens_per_micro_batch=1280",
             "cluster.offload=true", "actor.gradient_checkpointing=true", "actor.loss_chunk=128")  # fmt: skip
    layout = layout_of(*eight)
    actor = next(memory for memory in all_memory(layout) if memory.group == "actor")
    assert actor.items["weights being sent"] == count_sent_bytes(layout) > 3 * 512 * MIB


@pytest.mark.parametrize("count", [lambda push: "much", lambda push: math.nan, lambda push: -1.0, lambda: 1.0])
def test_a_class_that_counts_no_bytes_is_named(count: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectStore, "count_sent_bytes", staticmethod(count))
    layout = layout_of(*H100, "model.size=0.5b", "weights.transfer=object_store")
    with pytest.raises(ConfigError, match=re.escape("ObjectStore.count_sent_bytes()")):
        count_sent_bytes(layout)
