"""Buckets, and the buffers that tensors between GPUs lie in."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing import reductions

from gkd.config import Weights
from gkd.errors import RunFailed
from gkd.weights import ipc, nccl
from gkd.weights.delivery import Delivery, Destination, Push
from gkd.weights.packing import ALIGNMENT, PackedLayout, PackingSender, digest, pack, split_into_buckets, unpack
from gkd.weights.publishing import Publisher
from gkd.weights.transfer import IN_FLIGHT, Bucket, Receiver, Transfer

CPU = torch.device("cpu")
BUCKET = Bucket(4, 2, True)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float64]


class Sender(PackingSender):
    """Packs, and leaves the buffer where it is."""

    def pack(self, tensors: dict[str, Tensor], bucket: Bucket) -> PackedLayout:
        return self.pack_buffer(tensors)


class Packing(Transfer):
    sender, receiver = Sender, Receiver


@st.composite
def named(draw: st.DrawFn) -> dict[str, Tensor]:
    """Tensors of all types and shapes, empty and without dimensions too, some not contiguous."""
    tensors = {}
    for i in range(draw(st.integers(1, 8))):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 5), max_size=3))
        values = torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
        tensor = values.to(dtype)
        tensors[f"layer.{i}"] = tensor.t() if tensor.dim() == 2 and draw(st.booleans()) else tensor
    return tensors


@given(named(), st.integers(1, 400))
def test_buckets_hold_at_most_the_limit_or_one_tensor(tensors: dict[str, Tensor], limit: int) -> None:
    buckets = list(split_into_buckets(tensors.items(), limit))
    assert [name for bucket, _ in buckets for name in bucket] == list(tensors)
    assert [last for _, last in buckets] == [False] * (len(buckets) - 1) + [True]
    for bucket, _ in buckets:
        assert len(bucket) == 1 or sum(t.nbytes for t in bucket.values()) <= limit


@given(named())
def test_what_is_packed_is_unpacked_as_it_was(tensors: dict[str, Tensor]) -> None:
    layout = PackedLayout.from_tensors(tensors)
    packed = pack(layout, tensors, CPU)
    assert packed.nbytes == layout.n_bytes
    unpacked = unpack(BUCKET, dataclasses.replace(layout, digest=digest(packed)), packed)
    assert unpacked.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert unpacked[name].dtype == tensor.dtype
        assert torch.equal(unpacked[name], tensor)
        assert not unpacked[name].numel() or unpacked[name].data_ptr() % ALIGNMENT == packed.data_ptr() % ALIGNMENT


@given(st.binary(min_size=16, max_size=400), st.data())
def test_the_digest_finds_a_changed_byte_and_words_that_changed_places(raw: bytes, data: st.DataObject) -> None:
    good = torch.frombuffer(bytearray(raw[: len(raw) // 4 * 4]), dtype=torch.uint8)
    bad = good.clone()
    bad[data.draw(st.integers(0, len(bad) - 1))] ^= data.draw(st.integers(1, 255))
    assert digest(bad) != digest(good)
    moved, words = good.clone(), len(good) // 4
    one, other = data.draw(st.integers(0, words - 1)), data.draw(st.integers(0, words - 1))
    view = moved.view(torch.int32)
    view[one], view[other] = view[other].clone(), view[one].clone()
    assert (digest(moved) == digest(good)) == torch.equal(moved, good)


def test_the_digest_does_not_depend_on_how_the_buffer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    whole = digest(packed)
    monkeypatch.setattr("gkd.weights.packing._WORDS_AT_ONCE", 100)
    assert digest(packed) == whole


def test_a_buffer_that_is_not_the_buckets_is_refused() -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16)}
    layout = PackedLayout.from_tensors(tensors)
    packed = pack(layout, tensors, CPU)
    with pytest.raises(RunFailed, match=r"weights version 4, bucket 3: \(16,\) torch.uint8 .*\b32 bytes"):
        unpack(BUCKET, layout, packed[:16])
    packed_right, layout = packed.clone(), dataclasses.replace(layout, digest=digest(packed))
    packed[0] += 1
    with pytest.raises(RunFailed, match=r"weights version 4, bucket 3 .*\(weights\.checksum\)"):
        unpack(BUCKET, layout, packed)
    swapped = packed_right.view(torch.int32).clone()
    swapped[[0, 4]] = swapped[[4, 0]]
    with pytest.raises(RunFailed, match=r"weights\.checksum"):
        unpack(BUCKET, layout, swapped.view(torch.uint8))
    with pytest.raises(RunFailed, match=r"torch.float32 .*\b32 bytes"):
        unpack(BUCKET, layout, torch.zeros(32))
    unpack(BUCKET, layout, packed_right)


@pytest.mark.parametrize("checksum", [False, True])
def test_a_rank_that_packs_and_one_that_does_not_cut_alike(checksum: bool) -> None:
    # Of 400 KB and a little more, so that two fill a bucket of 1 MiB.
    tensors = {f"{i}": torch.full((100_000 + i,), float(i)) for i in range(7)}
    settings = Weights(transfer=f"{__name__}:Packing", checksum=checksum, bucket_mb=1)
    packs, gathers = (Publisher(settings, CPU, lambda: iter(tensors.items())) for _ in range(2))
    unpacked: dict[str, Tensor] = {}
    for number in range(4):
        bucket = packs.pack(5, number, packs=True)
        assert isinstance(packs.sender, Sender)
        assert len(packs.sender._held) == min(number + 1, IN_FLIGHT)  # the one before is still read
        assert gathers.pack(5, number, packs=False) == Bucket(5, number, number == 3)
        assert gathers.sender.packed_bucket is None
        layout: PackedLayout = bucket.contents[0]
        assert (bucket.number, bucket.last, layout.digest is not None) == (number, number == 3, checksum)
        assert packs.sender.packed_bucket is not None
        unpacked |= {name: t.clone() for name, t in unpack(bucket, layout, packs.sender.packed_bucket).items()}
    packs.sender.release()
    assert packs.sender.packed_bucket is None
    assert all(torch.equal(unpacked[name], tensor) for name, tensor in tensors.items())


def test_whole_tensors_are_sent_once_whatever_the_number_of_ranks() -> None:
    ranks = [SimpleNamespace(device="cpu", gpu_uuids=[]) for _ in range(3)]
    assert Packing.packing(ranks, set()) == [True, False, False]


def test_a_rank_whose_engine_died_packs_no_more() -> None:
    tensors = {f"{i}": torch.full((1 << 18,), float(i)) for i in range(4)}
    publisher = Publisher(Weights(transfer=f"{__name__}:Packing", bucket_mb=1), CPU, lambda: iter(tensors.items()))
    assert publisher.pack(5, 0, packs=True).contents
    assert [publisher.pack(5, number, packs=False) for number in (1, 2, 3)] == [
        Bucket(5, number, number == 3) for number in (1, 2, 3)
    ]
    assert publisher.sender.packed_bucket is None


class KeepingSender(Sender):
    """Keeps buffers that somebody has open as they are released, as torch does with CUDA's memory."""

    def __init__(self, settings: Weights, device: torch.device) -> None:
        super().__init__(settings, device)
        self.opened: list[int] = []  # numbers of buckets
        self.kept: list[int] = []

    def pack(self, tensors: dict[str, Tensor], bucket: Bucket) -> PackedLayout:
        self.opened.append(bucket.number)
        return super().pack(tensors, bucket)

    def forget_receivers(self) -> None:
        self.opened.clear()

    def release(self, keep: int = 0) -> None:
        n_held = len(self._held)
        super().release(keep)
        if len(self._held) < n_held:
            self.kept += [number for number in self.opened if number not in self.kept]


class Keeping(Transfer):
    sender, receiver = KeepingSender, Receiver


class Losing(Delivery):
    """Has buckets loaded at once, and loses its only engine instead of the third."""

    sender: KeepingSender
    n_sent = 0

    def send(self, bucket: Bucket) -> None:
        self.n_sent += 1
        if self.n_sent < 3:
            self.sender.opened.remove(bucket.number)

    def make_room(self, n: int = 1) -> None:
        if self.n_sent == 3:
            self.destinations.clear()
            self.lost[0] = RunFailed("gone")


def test_no_bucket_is_kept_for_an_engine_that_is_gone() -> None:
    tensors = {f"{i}": torch.full((1 << 18,), float(i)) for i in range(6)}
    publisher = Publisher(Weights(transfer=f"{__name__}:Keeping", bucket_mb=1), CPU, lambda: iter(tensors.items()))
    delivery, sender = Losing(Push(1, 5, 20.0), [Destination(0, None, 1)]), publisher.sender
    assert isinstance(sender, KeepingSender)
    delivery.sender = sender
    publisher.send(delivery)
    assert (delivery.n_sent, sender.packed_bucket, sender.kept) == (3, None, [])


class Flying(Delivery):
    """Has the oldest buckets loaded when there is to be room."""

    n_flying = 0

    def send(self, bucket: Bucket) -> None:
        self.n_flying += 1

    def make_room(self, n: int = IN_FLIGHT - 1) -> None:
        self.n_flying = min(self.n_flying, n)


def test_a_push_returns_once_its_last_buckets_are_loaded() -> None:
    """Their buffers are freed then."""
    tensors = {f"{i}": torch.full((1 << 18,), float(i)) for i in range(4)}
    publisher = Publisher(Weights(transfer=f"{__name__}:Packing", bucket_mb=1), CPU, lambda: iter(tensors.items()))
    delivery = Flying(Push(1, 5, 20.0), [Destination(0, None, 1)])
    publisher.send(delivery)
    assert (delivery.n_flying, publisher.sender.packed_bucket) == (0, None)


gathered_here: list[weakref.ref[Tensor]] = []


class FailingSender(Sender):
    """Has no memory for the second bucket."""

    def pack(self, tensors: dict[str, Tensor], bucket: Bucket) -> PackedLayout:
        if bucket.number == 1:
            gathered_here.extend(map(weakref.ref, tensors.values()))
            raise MemoryError("full")
        return super().pack(tensors, bucket)


class Failing(Transfer):
    sender, receiver = FailingSender, Receiver


def test_a_rank_that_cannot_send_takes_part_in_gathering_to_its_end() -> None:
    """The others would wait for it there, and be of no use for a checkpoint or the next push. It keeps nothing, as
    memory may be what it lacks.
    """
    gathered: list[int] = []
    held: list[int] = []

    def gather() -> Iterator[tuple[str, Tensor]]:
        for i in range(6):
            gathered.append(i)
            held.append(sum(tensor() is not None for tensor in gathered_here))
            yield f"{i}", torch.full((1 << 18,), float(i))

    publisher = Publisher(Weights(transfer=f"{__name__}:Failing", bucket_mb=1), CPU, gather)
    with pytest.raises(MemoryError, match="full"):
        publisher.send(Flying(Push(1, 5, 20.0), [Destination(0, None, 1)]))
    assert (gathered, publisher.sender.packed_bucket) == (list(range(6)), None)
    assert gathered_here and held[-1] == 0


def test_a_handle_is_opened_on_the_readers_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever number the GPU has there; and its count of readers is found, by torch's own names of the parts."""
    parts, released, opened = tuple(inspect.signature(reductions.rebuild_cuda_tensor).parameters), [], []
    monkeypatch.setattr(reductions, "reduce_tensor", lambda _: (None, parts))
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *its: opened.append(its) or torch.zeros(3))
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", lambda *its: released.append(its))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="aa"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    sender = ipc.IpcSender(Weights(transfer="ipc"), CPU)
    shared = sender.pack({"weight": torch.ones(4)}, Bucket(1, 0, True))
    sender.forget_receivers()
    sender.release()
    assert (shared.gpu, released) == ("aa", [("ref_counter_handle", "ref_counter_offset")])
    ipc.IpcReceiver(Weights(transfer="ipc"), torch.device("cuda:3")).open(shared)
    assert opened == [tuple(3 if part == "storage_device" else part for part in parts)]


def test_a_gpu_without_a_handle_is_named() -> None:
    layout = PackedLayout.from_tensors({})
    bucket = Bucket(2, 0, True, (ipc.SharedBuffer(layout, "aa", (1,)), ipc.SharedBuffer(layout, "bb", (2,))))
    assert ipc.buffer_on(bucket, "bb").handle == (2,)
    with pytest.raises(RunFailed, match=r"weights version 2, bucket 1: .*\bGPU cc .*\baa, bb"):
        ipc.buffer_on(bucket, "cc")


def test_an_engine_outside_of_the_group_says_so() -> None:
    with pytest.raises(RunFailed, match=r"weights version 2, bucket 1: .*NCCL group"):
        nccl.NcclReceiver(Weights(), CPU).receive(Bucket(2, 0, True, (PackedLayout.from_tensors({}),)))
