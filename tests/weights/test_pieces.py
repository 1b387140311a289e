"""Buckets, and the buffers that tensors between GPUs lie in."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gkd.errors import RunFailed
from gkd.weights import ipc, nccl
from gkd.weights.pieces import ALIGNMENT, Packer, Piece, buckets, digest, pack, unpack

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float64]


@st.composite
def named(draw: st.DrawFn) -> dict[str, Tensor]:
    """Tensors of all types and shapes, empty and without dimensions too, some not contiguous."""
    found = {}
    for i in range(draw(st.integers(1, 8))):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 5), max_size=3))
        values = torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
        tensor = values.to(dtype)
        found[f"layer.{i}"] = tensor.t() if tensor.dim() == 2 and draw(st.booleans()) else tensor
    return found


@given(named(), st.integers(1, 400))
def test_buckets_hold_at_most_the_limit_or_one_tensor(tensors: dict[str, Tensor], limit: int) -> None:
    found = list(buckets(tensors.items(), limit))
    assert [name for bucket in found for name in bucket] == list(tensors)
    for bucket in found:
        assert len(bucket) == 1 or sum(t.nbytes for t in bucket.values()) <= limit


@given(named())
def test_what_is_packed_is_unpacked_as_it_was(tensors: dict[str, Tensor]) -> None:
    piece = Piece.of(tensors, 3, 1)
    packed = pack(piece, tensors, CPU)
    assert packed.nbytes == piece.n_bytes
    found = unpack(dataclasses.replace(piece, digest=digest(packed)), packed)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        assert not found[name].numel() or found[name].data_ptr() % ALIGNMENT == packed.data_ptr() % ALIGNMENT


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
    monkeypatch.setattr("gkd.weights.pieces._WORDS_AT_ONCE", 100)
    assert digest(packed) == whole


def test_a_buffer_that_is_not_the_pieces_is_refused() -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16)}
    piece = Piece.of(tensors, 4, 2)
    packed = pack(piece, tensors, CPU)
    with pytest.raises(RunFailed, match=r"weights version 4, piece 3: \(16,\) torch.uint8 came instead of 32 bytes"):
        unpack(piece, packed[:16])
    packed_right, piece = packed.clone(), dataclasses.replace(piece, digest=digest(packed))
    packed[0] += 1
    with pytest.raises(RunFailed, match=r"weights version 4, piece 3 differs from what was sent \(weights.checksum\)"):
        unpack(piece, packed)
    unpack(piece, packed_right)


@pytest.mark.parametrize("checksum", [False, True])
def test_a_rank_that_packs_and_one_that_does_not_cut_alike(checksum: bool) -> None:
    tensors = {f"{i}": torch.full((100 + i,), float(i)) for i in range(7)}
    packs, gathers = (Packer(CPU, 900, checksum) for _ in range(2))
    packs.open(tensors.items(), 5, packs=True)
    gathers.open(tensors.items(), 5, packs=False)
    found: dict[str, Tensor] = {}
    number = 0
    while (piece := packs.next()) is not None:
        other = gathers.next()
        assert other is not None
        assert (other.names, other.shapes, other.number) == (piece.names, piece.shapes, number)
        assert gathers.packed is None
        assert (piece.digest is not None) == checksum
        assert packs.packed is not None
        found |= {name: t.clone() for name, t in unpack(piece, packs.packed).items()}
        number += 1
    assert number == 4
    assert gathers.next() is None
    assert packs.packed is None  # nothing is held between pushes
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_gpu_without_a_handle_is_named() -> None:
    piece = dataclasses.replace(Piece.of({}, 2, 0), handles={"aa": (1,), "bb": (2,)})
    assert ipc.handle_for(piece, "bb") == (2,)
    with pytest.raises(RunFailed, match=r"weights version 2, piece 1: no actor rank on GPU cc .*, only on aa, bb"):
        ipc.handle_for(piece, "cc")


def test_an_engine_outside_of_the_group_says_so() -> None:
    with pytest.raises(RunFailed, match=r"weights version 2, piece 1: this engine is in no NCCL group"):
        nccl.receive(Piece.of({}, 2, 0), None, CPU)
