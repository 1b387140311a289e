"""The wire format: what goes in comes out, and nothing else comes out."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gkd.sample import Target
from gkd.teacher import wire
from gkd.teacher.requests import Generate, Score

ids = st.integers(0, 2**63 - 1)
counts = st.integers(0, 2**31 - 1)
text = st.text(max_size=50)
tokens = st.binary(max_size=160).map(lambda raw: np.frombuffer(raw[: len(raw) // 4 * 4], np.int32))
temperatures = st.floats(1e-3, 1e3)
messages = st.one_of(
    st.builds(wire.Hello, counts),
    st.builds(wire.Welcome, counts, text, text, text, counts, counts, counts, counts),
    st.builds(wire.Ping),
    st.builds(wire.Pong, text),
    st.builds(wire.Error, st.none() | ids, st.sampled_from(["expired", "engine", "busy"]), text),
)


def _random_target(rows: int, k: int, seed: int, temperature: float) -> Target:
    """Any bits, NaN among them."""
    rng = np.random.default_rng(seed)
    return Target(
        np.frombuffer(rng.bytes(4 * rows), np.float32),
        np.frombuffer(rng.bytes(4 * rows * k), np.int32).reshape(rows, k),
        np.frombuffer(rng.bytes(4 * rows * k), np.float32).reshape(rows, k),
        temperature,
    )


targets = st.builds(_random_target, st.integers(0, 9), st.integers(0, 9), st.integers(0, 2**32), temperatures)
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine is shared


def sent(frames: list[Any]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


@patient
@given(messages)
def test_messages_without_arrays_come_back(message: wire.Message) -> None:
    assert wire.decode(sent(wire.encode(message))) == (message, [])


@patient
@given(ids, st.floats(1e-3, 1e6), tokens, tokens, counts, temperatures, st.none() | st.integers(1, 10**6))
def test_a_score_request_comes_back(
    id: int, remaining: float, prompt: Any, response: Any, k: int, temperature: float, vocabulary: int | None
) -> None:
    request = Score(prompt, response, k, temperature, vocabulary)
    body, found = wire.decode(sent(wire.encode_request(id, remaining, request)))
    assert isinstance(body, wire.Score)
    assert (body.id, body.remaining_s) == (id, remaining)
    back = wire.decode_request(body, found)
    assert isinstance(back, Score)
    assert (back.top_k, back.temperature, back.vocabulary) == (k, temperature, vocabulary)
    np.testing.assert_array_equal(back.prompt_ids, prompt)
    np.testing.assert_array_equal(back.response_ids, response)


@patient
@given(ids, targets)
def test_a_target_comes_back_bit_for_bit(id: int, target: Target) -> None:
    body, found = wire.decode(sent(wire.encode_answer(id, target)))
    assert isinstance(body, wire.Scored) and body.id == id
    back = wire.decode_target(body, found)
    assert back.temperature == target.temperature
    for name in ("token_logprobs", "ids", "logprobs"):
        was, now = getattr(target, name), getattr(back, name)
        assert now.dtype == was.dtype and now.shape == was.shape and now.tobytes() == was.tobytes()


@patient
@given(ids, tokens, st.integers(1, 1000))
def test_generate_and_its_answer_come_back(id: int, prompt: Any, max_tokens: int) -> None:
    body, found = wire.decode(sent(wire.encode_request(id, 1.0, Generate(prompt, max_tokens))))
    assert isinstance(body, wire.Generate)
    back = wire.decode_request(body, found)
    assert isinstance(back, Generate) and back.max_tokens == max_tokens
    np.testing.assert_array_equal(back.prompt_ids, prompt)
    answer, (response,) = wire.decode(sent(wire.encode_answer(id, prompt)))
    assert answer == wire.Generated(id)
    np.testing.assert_array_equal(response, prompt)


@patient
@given(st.lists(st.binary(max_size=60), max_size=5))
def test_arbitrary_frames_are_a_message_or_a_wire_error(frames: list[bytes]) -> None:
    with contextlib.suppress(wire.WireError):
        wire.decode(frames)


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
    st.sampled_from(["type", "id", "remaining_s", "n_prompt", "top_k", "temperature", "vocabulary", "max_tokens"]),
    anything | st.sampled_from(["score", "scored", "generate", "hello"]) | st.integers(0, 9) | st.just(0.5),
)
specs = st.lists(st.tuples(st.sampled_from(["<i4", "<f4", "|O", ">i4"]), st.lists(st.integers(-1, 2**40), max_size=3)))


@patient
@given(st.tuples(fields, specs) | anything, st.lists(st.binary(max_size=32), max_size=3))
def test_well_formed_headers_with_any_content_are_a_message_or_a_wire_error(header: Any, rest: list[bytes]) -> None:
    try:
        body, found = wire.decode([msgspec.msgpack.encode(header), *rest])
        if isinstance(body, wire.Score | wire.Generate):
            wire.decode_request(body, found)
    except wire.WireError:
        pass


def test_sizes_that_do_not_fit_are_named() -> None:
    frames = sent(wire.encode(wire.Generated(1), np.arange(5, dtype=np.int32)))
    with pytest.raises(wire.WireError, match=r"19 bytes for <i4 \[5\]"):
        wire.decode([frames[0], frames[1][:-1]])
    with pytest.raises(wire.WireError, match="1 arrays; 1 announced, 0 sent"):
        wire.decode(frames[:1])
    huge = msgspec.msgpack.encode((wire.Generated(1), [("<i4", (2**31 - 1,))]))
    with pytest.raises(wire.WireError, match="4 bytes for"):
        wire.decode([huge, b"1234"])


@pytest.mark.parametrize("name", ["|O", "<f8", ">i4"])
def test_no_other_dtype_is_read(name: str) -> None:
    header = msgspec.msgpack.encode((wire.Generated(1), [(name, (1,))]))
    with pytest.raises(wire.WireError, match="where <i4 of 1 axes belongs"):
        wire.decode([header, b"12345678"[: np.dtype(name).itemsize]])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.0, -1.0, True, "1"])
def test_numbers_out_of_range_are_refused(number: Any) -> None:
    body = {"type": "score", "id": 1, "remaining_s": 1.0, "n_prompt": 1, "top_k": 1, "temperature": number}
    with pytest.raises(wire.WireError, match="temperature"):
        wire.decode([msgspec.msgpack.encode((body, [("<i4", (1,))])), b"1234"])
