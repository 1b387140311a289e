"""The wire format between a scorer's server and its clients.

A message is one frame: the length of a msgpack header (uint32), the header, zeros up to a multiple of four bytes, and
the raw bytes of its arrays, all little-endian. Being one frame, it is bounded by ZMQ_MAXMSGSIZE before anything of it
is in memory; a message of several frames is none. The header is ``[body, [[dtype, shape], ...]]``, where body is a map
whose "type" names one of the kinds below. Decoding is strict: unknown kinds or fields, other types, numbers out of
range, or sizes that are not those of dtype and shape raise :class:`WireError`. Nothing is unpickled, and nothing is
allocated from a size that a header claims. Messages to one peer at one time go together: a frame that begins with a
header of length 0 has several, each after its own length (uint32). An answer of more than :data:`PART_BYTES` comes in
parts that follow each other, each after a length of 2^32 - 1, its index and how many they are (uint32 each): by every
one of them a client sees that a slow network gets on, where the answer to a heartbeat is behind all of them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from gkd.config.sampling import MAX_TEMPERATURE, MIN_TEMPERATURE
from gkd.data.rendering import Rendering
from gkd.inference import requests
from gkd.inference.requests import ErrorCode
from gkd.types import Array, Float32, Int32, Target

PROTOCOL = 9
MAX_REQUEST_HEADER_BYTES = 1 << 12
MAX_REPLY_HEADER_BYTES = 1 << 18  # a welcome's has a chat template
MAX_PACKED_REPLIES_BYTES = MAX_REPLY_HEADER_BYTES  # which every client takes, whatever it expects
PART_BYTES = 1 << 20


_Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Count = Annotated[int, Meta(ge=0, lt=2**31)]
_Text = Annotated[str, Meta(max_length=4096)]
_Seconds = Annotated[float, Meta(gt=0, le=1e7)]
_Temperature = Annotated[float, Meta(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)]


class WireError(Exception):
    """Bytes that are no message of this protocol."""


class Body(msgspec.Struct, frozen=True, tag=str.lower, forbid_unknown_fields=True):
    """Base of every kind of message."""


class Hello(Body, frozen=True, forbid_unknown_fields=False):
    """Client to server, first. Other versions may have other fields, as in a welcome: only ``protocol`` is read."""

    protocol: _Count


class Welcome(Body, frozen=True, forbid_unknown_fields=False):
    """Description of a server. ``session`` differs after every start; ``rendering`` is for clients that have not got
    the model's files, and ``weights`` is what its weights are known by; the rest is as in requests.Limits.
    """

    protocol: _Count
    session: _Text
    model: _Text
    tokenizer_hash: _Text
    vocabulary: _Count
    max_top_k: _Count
    max_length: _Count
    capacity: _Count
    rendering: Rendering | None = None
    weights: _Text = ""


class Ping(Body, frozen=True):
    """Client to server, every heartbeat."""


class Pong(Body, frozen=True):
    """The answer, sent also while the engine is busy. ``steps``: of the engine so far, by which one sees it get on.

    ``session`` is empty for a connection that sent no Hello: requests that came on an earlier one are not known on it.
    """

    session: _Text
    steps: _Id


class ScoreMessage(Body, frozen=True, tag="score"):
    """Score N positions; see requests.ScoreRequest.

    Arrays: tokens int32 [L], spans int32 [S, 2], a start and a stop each.
    ``remaining_s``: seconds from its arrival within which the answer is of use.
    """

    id: _Id
    remaining_s: _Seconds
    top_k: _Count
    temperature: _Temperature
    vocabulary: Annotated[int, Meta(ge=1, lt=2**31)] | None = None


class ScoreReply(Body, frozen=True, tag="score_reply"):
    """The answer. Arrays: token_logprobs float32 [N], ids int32 [N, K], logprobs float32 [N, K], tail_logprobs
    float32 [N], or [0] where there is no tail.
    """

    id: _Id
    temperature: _Temperature


class GenerateMessage(Body, frozen=True, tag="generate"):
    """Continue a prompt greedily. Array: prompt int32 [P]."""

    id: _Id
    remaining_s: _Seconds
    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)]


class GenerateReply(Body, frozen=True, tag="generate_reply"):
    """The answer. Array: response int32 [R]."""

    id: _Id


class RateMessage(Body, frozen=True, tag="rate"):
    """Rate a sequence. Array: tokens int32 [L]."""

    id: _Id
    remaining_s: _Seconds


class RateReply(Body, frozen=True, tag="rate_reply"):
    """The answer; it may not be a finite number."""

    id: _Id
    value: float


class Error(Body, frozen=True):
    """Reason for no answer; ``id`` is None when the request could not even be read."""

    id: _Id | None
    code: ErrorCode
    message: _Text


AnyRequest: TypeAlias = ScoreMessage | GenerateMessage | RateMessage
Message: TypeAlias = Hello | Welcome | Ping | Pong | AnyRequest | ScoreReply | GenerateReply | RateReply | Error

_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")
# Dtype and number of axes of each kind's arrays.
_ARRAYS: dict[type[Body], tuple[tuple[np.dtype[Any], int], ...]] = {
    ScoreMessage: ((_INT, 1), (_INT, 2)),
    ScoreReply: ((_FLOAT, 1), (_INT, 2), (_FLOAT, 2), (_FLOAT, 1)),
    GenerateMessage: ((_INT, 1),),
    GenerateReply: ((_INT, 1),),
    RateMessage: ((_INT, 1),),
}

_Spec: TypeAlias = tuple[Annotated[str, Meta(max_length=3)], Annotated[list[_Count], Meta(max_length=2)]]
_Header: TypeAlias = tuple[Message, Annotated[list[_Spec], Meta(max_length=4)]]
_LENGTH, _ALIGNMENT = struct.Struct("<I"), 4
_PART, _PART_MARK = struct.Struct("<III"), 2**32 - 1
_ENCRYPTION_BYTES = 64  # CURVE adds 33 to a message, and ZMQ_MAXMSGSIZE is about what comes over the network
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


def encode(body: Message, *arrays: Array) -> bytes:
    """Encode a message as one frame."""
    expected = _ARRAYS.get(type(body), ())
    assert [a.ndim for a in arrays] == [ndim for _, ndim in expected], f"{type(body).__name__} has other arrays"
    plain = [np.ascontiguousarray(a, dtype) for a, (dtype, _) in zip(arrays, expected, strict=True)]
    header = _encoder.encode((body, [(a.dtype.str, a.shape) for a in plain]))
    parts = [_LENGTH.pack(len(header)), header, bytes(-len(header) % _ALIGNMENT)]
    return b"".join([*parts, *(a.data.cast("B") for a in plain if a.size)])  # a view without elements cannot be cast


def decode(frame: bytes, max_header_bytes: int = MAX_REPLY_HEADER_BYTES) -> tuple[Message, list[Array]]:
    """Decode the message in ``frame`` and its arrays, which share the frame's memory and cannot be written to.

    Raises WireError, and nothing else, whatever the frame holds.
    """
    length = _LENGTH.unpack_from(frame)[0] if len(frame) >= _LENGTH.size else 0
    if not 0 < length <= min(max_header_bytes, len(frame) - _LENGTH.size):
        raise WireError(f"a frame of {len(frame)} bytes with a header of {length}")
    try:
        body, specs = _decoder.decode(memoryview(frame)[_LENGTH.size : _LENGTH.size + length])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"unreadable header: {error}") from None
    expected = _ARRAYS.get(type(body), ())
    if len(expected) != len(specs):
        raise WireError(f"{type(body).__name__} has {len(expected)} arrays; {len(specs)} announced")
    at = _LENGTH.size + length + -length % _ALIGNMENT
    end = at + sum(math.prod(shape) * dtype.itemsize for (dtype, _), (_, shape) in zip(expected, specs, strict=True))
    arrays = []
    for (dtype, ndim), (name, shape) in zip(expected, specs, strict=True):
        if name != dtype.str or len(shape) != ndim:
            raise WireError(f"{type(body).__name__}: {name} {shape} where {dtype.str} of {ndim} axes belongs")
        if end != len(frame):
            raise WireError(f"{type(body).__name__}: {len(frame)} bytes where its arrays need {end}")
        arrays.append(np.frombuffer(frame, dtype, math.prod(shape), at).reshape(shape))
        at += arrays[-1].nbytes
    if not arrays and end != len(frame):
        raise WireError(f"{type(body).__name__}: {len(frame) - end} bytes too many")
    return body, arrays


def group_frames(frames: Sequence[bytes], most: int) -> Iterator[list[bytes]]:
    """Yield neighbours of ``frames`` that, packed and encrypted, have ``most`` bytes at most; larger ones alone."""
    together: list[bytes] = []
    empty = _LENGTH.size + _ENCRYPTION_BYTES
    size = empty
    for frame in frames:
        if together and size + _LENGTH.size + len(frame) > most:
            yield together
            together, size = [], empty
        together.append(frame)
        size += _LENGTH.size + len(frame)
    if together:
        yield together


def pack(frames: Sequence[bytes]) -> bytes:
    """Put the frames of messages into one; one alone stays as it is."""
    if len(frames) == 1:
        return frames[0]
    return b"".join([_LENGTH.pack(0), *(part for frame in frames for part in (_LENGTH.pack(len(frame)), frame))])


def unpack(frame: bytes) -> list[bytes]:
    """Return the frames of the messages in ``frame``. Raises WireError, and nothing else, whatever it holds."""
    if not frame.startswith(_LENGTH.pack(0)):
        return [frame]
    frames, at = [], _LENGTH.size
    while at < len(frame):
        (length,) = _LENGTH.unpack_from(frame, at) if len(frame) - at >= _LENGTH.size else (0,)
        at += _LENGTH.size
        if not 0 < length <= len(frame) - at:
            raise WireError(f"{len(frame)} bytes of messages of which one has {length}")
        frames.append(frame[at : at + length])
        at += length
    return frames


def split(frame: bytes) -> Iterator[bytes]:
    """Yield the parts of a large frame, for :class:`Joiner`; one that is small as it is."""
    n_parts = -(-len(frame) // PART_BYTES)
    if n_parts <= 1:
        yield frame
        return
    view = memoryview(frame)
    for index in range(n_parts):
        yield b"".join([_PART.pack(_PART_MARK, index, n_parts), view[index * PART_BYTES : (index + 1) * PART_BYTES]])


class Joiner:
    """Joins the parts that :func:`split` made, of ``largest`` bytes at most in all."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._parts: list[memoryview] = []

    def add(self, frame: bytes) -> bytes | None:
        """Return what is whole now; None where further parts have to come.

        Raises WireError for parts that are not the next ones, or of more than the largest answer.
        """
        if not frame.startswith(_LENGTH.pack(_PART_MARK)):
            self._parts.clear()  # their connection has ended
            return frame
        if len(frame) <= _PART.size:
            raise WireError(f"a part of {len(frame)} bytes")
        _, index, n_parts = _PART.unpack_from(frame)
        if index == 0:
            self._parts.clear()
        if index != len(self._parts) or index >= n_parts or n_parts > -(-self._largest // PART_BYTES):
            raise WireError(f"part {index} of {n_parts} after {len(self._parts)}")
        self._parts.append(memoryview(frame)[_PART.size :])
        if len(self._parts) < n_parts:
            return None
        whole, self._parts = b"".join(self._parts), []
        return whole


def largest_frame(largest: int) -> int:
    """Return bytes that a frame of answers can have of which none is larger than ``largest``."""
    return min(largest, PART_BYTES) + _PART.size + _ENCRYPTION_BYTES


def largest_request(max_length: int) -> int:
    """Return bytes that a request about ``max_length`` tokens can have, every other one of which may be a span."""
    return _LENGTH.size + MAX_REQUEST_HEADER_BYTES + _ALIGNMENT + 4 * max_length + 8 * (max_length // 2 + 1)


def largest_reply(rows: int, top_k: int) -> int:
    """Return bytes that an answer about ``rows`` tokens with K of ``top_k`` each can have."""
    return _LENGTH.size + MAX_REPLY_HEADER_BYTES + _ALIGNMENT + rows * (8 + 8 * top_k)


def encode_request(id: int, remaining_s: float, request: requests.Request) -> bytes:
    """Encode a request as one frame."""
    if isinstance(request, requests.RateRequest):
        return encode(RateMessage(id, remaining_s), request.token_ids)
    if isinstance(request, requests.GenerateRequest):
        return encode(GenerateMessage(id, remaining_s, request.max_tokens), request.prompt_ids)
    body = ScoreMessage(id, remaining_s, request.top_k, float(request.temperature), request.vocabulary)
    return encode(body, request.token_ids, np.array(request.spans, np.int32).reshape(-1, 2))


def decode_request(body: AnyRequest, arrays: Sequence[Array]) -> requests.Request:
    """Decode the request in a message. Raises WireError."""
    tokens = arrays[0]
    if isinstance(body, RateMessage):
        return requests.RateRequest(tokens)
    if isinstance(body, GenerateMessage):
        return requests.GenerateRequest(tokens, body.max_tokens)
    if arrays[1].shape[1] != 2:
        raise WireError(f"spans of {arrays[1].shape[1]} numbers each")
    spans = tuple((start, stop) for start, stop in arrays[1].tolist())
    return requests.ScoreRequest(tokens, spans, body.top_k, body.temperature, body.vocabulary)


def encode_answer(id: int, answer: requests.ScorerAnswer) -> bytes:
    """Encode the answer to request ``id`` as one frame."""
    if isinstance(answer, Target):
        tails = np.zeros(0, np.float32) if answer.tail_logprobs is None else answer.tail_logprobs
        return encode(
            ScoreReply(id, float(answer.temperature)), answer.token_logprobs, answer.ids, answer.logprobs, tails
        )
    if np.ndim(answer):
        return encode(GenerateReply(id), np.asarray(answer))
    return encode(RateReply(id, float(answer)))  # numpy's and torch's numbers as well


def decode_target(body: ScoreReply, arrays: Sequence[Array]) -> Target:
    """Decode the target in a message. Raises WireError when its arrays do not belong together."""
    token_logprobs: Float32
    ids: Int32
    logprobs: Float32
    tails: Float32
    token_logprobs, ids, logprobs, tails = arrays
    try:
        return Target(token_logprobs, ids, logprobs, body.temperature, tails if len(tails) else None)
    except ValueError as error:
        raise WireError(str(error)) from None
