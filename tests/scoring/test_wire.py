"""The wire format: what goes in comes out, and nothing else comes out."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gkd.data.rendering import Rendering
from gkd.inference.requests import GenerateRequest, ScoreRequest
from gkd.scoring import wire
from gkd.types import Target

ids = st.integers(0, 2**63 - 1)
counts = st.integers(0, 2**31 - 1)
text = st.text(max_size=50)
tokens = st.binary(max_size=160).map(lambda raw: np.frombuffer(raw[: len(raw) // 4 * 4], np.int32))
spans = st.lists(st.tuples(counts, counts), max_size=5).map(tuple)
temperatures = st.floats(1e-3, 1e3)
renderings = st.builds(
    Rendering,
    st.none() | text,
    st.dictionaries(text, text, max_size=3),
    st.lists(counts, max_size=3),
    st.lists(counts, max_size=3),
)
messages = st.one_of(
    st.builds(wire.Hello, counts),
    st.builds(wire.Welcome, counts, text, text, text, counts, counts, counts, counts, st.none() | renderings),
    st.builds(wire.Ping),
    st.builds(wire.Pong, text, ids),
    st.builds(wire.Error, st.none() | ids, st.sampled_from(["expired", "engine", "busy"]), text),
)


def _random_target(rows: int, k: int, seed: int, temperature: float, tail: bool) -> Target:
    """Any bits, NaN among them."""
    rng = np.random.default_rng(seed)
    return Target(
        np.frombuffer(rng.bytes(4 * rows), np.float32),
        np.frombuffer(rng.bytes(4 * rows * k), np.int32).reshape(rows, k),
        np.frombuffer(rng.bytes(4 * rows * k), np.float32).reshape(rows, k),
        temperature,
        np.frombuffer(rng.bytes(4 * rows), np.float32) if tail and rows else None,
    )


sizes = st.integers(0, 9)
targets = st.builds(_random_target, sizes, sizes, st.integers(0, 2**32), temperatures, st.booleans())
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine is shared


def framed(header: bytes, arrays: bytes = b"") -> bytes:
    return struct.pack("<I", len(header)) + header + bytes(-len(header) % 4) + arrays


@patient
@given(messages)
def test_messages_without_arrays_come_back(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message)) == (message, [])


@patient
@given(ids, st.floats(1e-3, 1e6), tokens, spans, counts, temperatures, st.none() | st.integers(1, 10**6))
def test_a_score_request_comes_back(
    id: int, remaining: float, sequence: Any, spans: Any, k: int, temperature: float, vocabulary: int | None
) -> None:
    request = ScoreRequest(sequence, spans, k, temperature, vocabulary)
    body, arrays = wire.decode(wire.encode_request(id, remaining, request))
    assert isinstance(body, wire.ScoreMessage)
    assert (body.id, body.remaining_s) == (id, remaining)
    back = wire.decode_request(body, arrays)
    assert isinstance(back, ScoreRequest)
    assert (back.spans, back.top_k, back.temperature, back.vocabulary) == (spans, k, temperature, vocabulary)
    np.testing.assert_array_equal(back.token_ids, sequence)


@patient
@given(ids, targets)
def test_a_target_comes_back_bit_for_bit(id: int, target: Target) -> None:
    body, arrays = wire.decode(wire.encode_answer(id, target))
    assert isinstance(body, wire.ScoreReply) and body.id == id
    back = wire.decode_target(body, arrays)
    assert back.temperature == target.temperature
    for name in ("token_logprobs", "ids", "logprobs"):
        was, now = getattr(target, name), getattr(back, name)
        assert now.dtype == was.dtype and now.shape == was.shape and now.tobytes() == was.tobytes()
    assert (back.tail_logprobs is None) == (target.tail_logprobs is None)
    if back.tail_logprobs is not None and target.tail_logprobs is not None:
        assert back.tail_logprobs.tobytes() == target.tail_logprobs.tobytes()


@patient
@given(ids, tokens, st.integers(1, 1000))
def test_generate_and_its_answer_come_back(id: int, prompt: Any, max_tokens: int) -> None:
    body, arrays = wire.decode(wire.encode_request(id, 1.0, GenerateRequest(prompt, max_tokens)))
    assert isinstance(body, wire.GenerateMessage)
    back = wire.decode_request(body, arrays)
    assert isinstance(back, GenerateRequest) and back.max_tokens == max_tokens
    np.testing.assert_array_equal(back.prompt_ids, prompt)
    answer, (response,) = wire.decode(wire.encode_answer(id, prompt))
    assert answer == wire.GenerateReply(id)
    np.testing.assert_array_equal(response, prompt)


@pytest.mark.parametrize("rating", [0.5, 2, np.float32(0.5), np.int64(2)], ids=lambda rating: type(rating).__name__)
def test_a_rating_may_be_any_kind_of_number(rating: Any) -> None:
    """As an engine of one's own has them from its model."""
    assert wire.decode(wire.encode_answer(7, rating)) == (wire.RateReply(7, float(rating)), [])


def test_one_token_of_torch_is_no_rating() -> None:
    answer, (response,) = wire.decode(wire.encode_answer(7, torch.tensor([5], dtype=torch.int32)))  # type: ignore[arg-type]
    assert answer == wire.GenerateReply(7)
    np.testing.assert_array_equal(response, [5])


@patient
@given(st.lists(messages, max_size=9), st.integers(0, 300))
def test_messages_that_go_together_come_back_in_their_order(sent: list[wire.Message], most: int) -> None:
    frames = [wire.encode(message) for message in sent]
    packed = [wire.pack(together) for together in wire.group_frames(frames, most)]
    assert [one for frame in packed for one in wire.unpack(frame)] == frames
    assert all(len(frame) + 33 <= most or frame in frames for frame in packed)  # 33: what CURVE adds


@patient
@given(st.lists(st.binary(max_size=40), max_size=9), st.integers(1, 12))
def test_large_frames_come_back_whole(sent: list[bytes], part_bytes: int) -> None:
    frames = [b"....." + frame for frame in sent]  # no frame begins as a part does
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "PART_BYTES", part_bytes)
        joiner = wire.Joiner(45)
        parts = [part for frame in frames for part in wire.split(frame)]
        assert [whole for part in parts if (whole := joiner.add(part)) is not None] == frames
        most = max(map(len, frames), default=0)
        assert all(len(part) + 33 <= wire.largest_frame(most) for part in parts)


def test_parts_that_do_not_belong_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PART_BYTES", 10)
    first, second, third = wire.split(bytes(range(1, 31)))
    for wrong in ([second], [first, third], [first, second, second], [first, second, third, third]):
        joiner = wire.Joiner(30)
        with pytest.raises(wire.WireError, match=r"part \d of 3"):
            for part in wrong:
                joiner.add(part)
    with pytest.raises(wire.WireError, match="part 0 of 3"):
        wire.Joiner(20).add(first)
    with pytest.raises(wire.WireError, match="12 bytes"):
        joiner.add(first[:12])
    joiner = wire.Joiner(30)
    cut = [joiner.add(part) for part in (first, second, b"whole", first, second, first, second, third)]
    assert cut == [None, None, b"whole", None, None, None, None, bytes(range(1, 31))]


@patient
@given(st.binary(max_size=200) | st.binary(max_size=60).map(framed) | st.binary(max_size=60).map(bytes(4).__add__))
def test_arbitrary_bytes_are_messages_or_a_wire_error(frame: bytes) -> None:
    with contextlib.suppress(wire.WireError):
        for one in wire.unpack(frame):
            wire.decode(one)


def test_what_goes_together_is_neither_cut_nor_nested() -> None:
    ping = wire.encode(wire.Ping())
    both = wire.pack([ping, ping])
    for damaged in (both[:-1], both + bytes(4), both[: -len(ping)], bytes(4) + struct.pack("<I", 1 << 31)):
        with pytest.raises(wire.WireError, match="one has"):
            wire.unpack(damaged)
    nested = wire.unpack(wire.pack([both, ping]))
    with pytest.raises(wire.WireError, match="header of 0"):
        wire.decode(nested[0])


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
)
fields = st.dictionaries(
    st.sampled_from(["type", "id", "remaining_s", "top_k", "temperature", "vocabulary", "max_tokens"]),
    anything | st.sampled_from(["score", "score_reply", "generate", "hello"]) | st.integers(0, 9) | st.just(0.5),
)
specs = st.lists(st.tuples(st.sampled_from(["<i4", "<f4", "|O", ">i4"]), st.lists(st.integers(-1, 2**40), max_size=3)))


@patient
@given(st.tuples(fields, specs) | anything, st.binary(max_size=64))
def test_well_formed_headers_with_any_content_are_a_message_or_a_wire_error(header: Any, rest: bytes) -> None:
    try:
        body, arrays = wire.decode(framed(msgspec.msgpack.encode(header), rest))
        if isinstance(body, wire.ScoreMessage | wire.GenerateMessage):
            wire.decode_request(body, arrays)
    except wire.WireError:
        pass


def test_a_span_is_two_numbers() -> None:
    body = wire.ScoreMessage(1, 1.0, 0, 1.0)
    frame = wire.encode(body, np.arange(3, dtype=np.int32), np.ones((1, 3), np.int32))
    with pytest.raises(wire.WireError, match="spans of 3 numbers each"):
        wire.decode_request(*wire.decode(frame))


def test_sizes_that_do_not_fit_are_named() -> None:
    frame = wire.encode(wire.GenerateReply(1), np.arange(5, dtype=np.int32))
    for wrong in (frame[:-1], frame + b"1234"):
        with pytest.raises(wire.WireError, match=rf"GenerateReply: {len(wrong)} bytes .*{len(frame)}"):
            wire.decode(wrong)
    with pytest.raises(wire.WireError, match="4 bytes"):
        wire.decode(wire.encode(wire.Ping()) + b"1234")
    with pytest.raises(wire.WireError, match="1 arrays; 0 announced"):
        wire.decode(framed(msgspec.msgpack.encode((wire.GenerateReply(1), []))))
    huge = msgspec.msgpack.encode((wire.GenerateReply(1), [("<i4", (2**31 - 1,))]))
    with pytest.raises(wire.WireError, match="need 8589934"):
        wire.decode(framed(huge, b"1234"))
    with pytest.raises(wire.WireError, match=r"104 bytes .*header of 100"):
        wire.decode(framed(bytes(100)), 99)


@pytest.mark.parametrize("name", ["|O", "<f8", ">i4"])
def test_no_other_dtype_is_read(name: str) -> None:
    header = msgspec.msgpack.encode((wire.GenerateReply(1), [(name, (1,))]))
    with pytest.raises(wire.WireError, match="where <i4 of 1 axes belongs"):
        wire.decode(framed(header, b"12345678"[: np.dtype(name).itemsize]))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.0, -1.0, True, "1"])
def test_numbers_out_of_range_are_refused(number: Any) -> None:
    body = {"type": "score", "id": 1, "remaining_s": 1.0, "top_k": 1, "temperature": number}
    with pytest.raises(wire.WireError, match="temperature"):
        wire.decode(framed(msgspec.msgpack.encode((body, [("<i4", (1,)), ("<i4", (0, 2))])), b"1234"))


@given(tokens, st.integers(0, 9), st.integers(0, 2**32))
@patient
def test_what_a_message_can_have_is_bounded(prompt: Any, k: int, seed: int) -> None:
    every_other = tuple((i, i + 1) for i in range(1, len(prompt), 2))
    request = ScoreRequest(prompt, every_other, 2**31 - 1, 1 / 3, 2**31 - 1)
    assert len(wire.encode_request(2**63 - 1, 1e7 / 3, request)) <= wire.largest_request(len(prompt))
    answer = _random_target(len(prompt), k, seed, 1 / 3, True)
    assert len(wire.encode_answer(2**63 - 1, answer)) <= wire.largest_reply(len(prompt), k)
