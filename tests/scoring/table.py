"""A small engine that computes from a known table, to test everything between a client and an engine.

Run as a program it is a server in a process of its own, which tests kill, stop and start again:
``python -m tests.scoring.table PORT DELAY_S MAX_LENGTH BOUNDS PUBLIC SECRET`` prints its address and serves until it
is killed.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from collections.abc import Iterator

import numpy as np

from gkd.inference.requests import GenerateRequest, Limits, RequestRejected, ScoreRequest
from gkd.scoring.address import Key
from gkd.scoring.connections import ClientLimits
from gkd.scoring.server import ScoringServer
from gkd.types import Int32, Target

VOCABULARY = 32
LOGITS = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY))  # of the next token after each token
KEY = Key.generate()
FULL_VOCABULARY = 2**31 - 1  # as K: every token there is
POISON = 31  # as first token of a prompt: the engine fails


def expected(request: ScoreRequest) -> Target:
    """What the table says about a request."""
    rows = VOCABULARY if request.vocabulary is None else min(VOCABULARY, request.vocabulary)
    positions = np.concatenate([np.arange(start, stop) for start, stop in request.spans])
    logits = LOGITS[request.token_ids[positions - 1], :rows] / request.temperature
    logprobs = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)
    ids = np.argsort(-logprobs, axis=-1)[:, : request.top_k].astype(np.int32)
    token_logprobs = logprobs[np.arange(len(positions)), request.token_ids[positions]]
    rest = np.exp(logprobs.astype(np.float64))
    np.put_along_axis(rest, ids, 0.0, -1)
    tails = np.log(rest.sum(-1)).astype(np.float32) if 0 < ids.shape[1] < rows else None
    return Target(token_logprobs, ids, np.take_along_axis(logprobs, ids, -1), request.temperature, tails)


def greedy(request: GenerateRequest) -> Int32:
    """The table's most likely continuation."""
    ids = [int(request.prompt_ids[-1])]
    for _ in range(request.max_tokens):
        ids.append(int(LOGITS[ids[-1]].argmax()))
    return np.array(ids[1:], np.int32)


class TableEngine:
    """Answers one request a step, ``delay_s`` after it began with it, or once ``hurry`` is set."""

    forward_passes = 0

    def __init__(
        self,
        delay_s: float = 0.0,
        capacity: int = 64,
        max_length: int = 100,
        max_top_k: int = 32,
        poison: int | None = POISON,
    ) -> None:
        self.limits = Limits("teacher", "table", VOCABULARY, max_top_k, max_length, capacity)
        self.delay_s, self.poison, self.worked_on, self.asleep = delay_s, poison, 0, False
        self.hurry = threading.Event()
        self._queue: deque[tuple[int, ScoreRequest | GenerateRequest]] = deque()

    def add(self, key: int, request: ScoreRequest | GenerateRequest) -> None:
        self._queue.append((key, request))

    def has_unfinished_requests(self) -> bool:
        return bool(self._queue)

    def step(self) -> Iterator[tuple[int, Target | Int32 | RequestRejected]]:
        assert not self.asleep
        key, request = self._queue.popleft()
        self.worked_on += 1
        self.hurry.wait(self.delay_s)
        ids = request.token_ids if isinstance(request, ScoreRequest) else request.prompt_ids
        if ids[0] == self.poison:
            raise ValueError("poisoned")
        yield key, expected(request) if isinstance(request, ScoreRequest) else greedy(request)

    def sleep(self) -> None:
        assert not self._queue
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False

    def close(self) -> None:
        pass


def main(port: str, delay_s: str, max_length: str, client_limits: str, public: str, secret: str) -> None:
    engine = TableEngine(float(delay_s), max_length=int(max_length))
    key = Key(public.encode(), secret.encode())
    server = ScoringServer(
        engine, "hash", "127.0.0.1", int(port), key, client_limits=ClientLimits(**json.loads(client_limits))
    )
    print(server.address, flush=True)
    server.serve(threading.Event())


if __name__ == "__main__":
    main(*sys.argv[1:])
