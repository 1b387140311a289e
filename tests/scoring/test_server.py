"""A running server: answers, rejections, and bytes that are no messages."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gkd.scoring.server
from gkd.cluster.workers.activity import Activity
from gkd.errors import ConfigError, RunFailed
from gkd.inference.requests import GenerateRequest, ScoreRequest, ScorerRejected
from gkd.scoring import wire
from gkd.scoring.clients import Clients
from gkd.scoring.server import ScoringServer
from gkd.scoring.wakeup import Wakeup
from gkd.types import Target
from tests.ray.cluster.conftest import eventually
from tests.scoring.conftest import Connect, Serve, a_score, greet
from tests.scoring.table import FULL_VOCABULARY, POISON, VOCABULARY, TableEngine, expected, greedy


def assert_same(actual: Target, expected: Target) -> None:
    np.testing.assert_allclose(actual.token_logprobs, expected.token_logprobs, rtol=1e-6)
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, rtol=1e-6)
    np.testing.assert_array_equal(actual.ids, expected.ids)
    assert (actual.tail_logprobs is None) == (expected.tail_logprobs is None)
    if actual.tail_logprobs is not None:
        np.testing.assert_array_equal(actual.tail_logprobs, expected.tail_logprobs)
    assert actual.temperature == expected.temperature


def n_queued(server: ScoringServer) -> int:
    """Count what has come and the engine has not begun with."""
    return sum(len(client.queue) for client in tuple(server._frontend._clients._clients.values()))


def test_an_idle_engine_begins_with_all_requests_that_come_together(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, queued, put = list[Any](), list[int](), Clients.put

    def gather(_: float) -> None:
        assert eventually(lambda: len(arrived) == 4)  # however long that takes on a busy machine

    monkeypatch.setattr(Clients, "put", lambda clients, job: (put(clients, job), arrived.append(job)))
    monkeypatch.setattr(gkd.scoring.server, "GATHER_S", 60.0)
    monkeypatch.setattr(gkd.scoring.server, "time", SimpleNamespace(monotonic=time.monotonic, sleep=gather))

    class Engine(TableEngine):
        def step(self) -> Iterator[tuple[int, Any]]:
            queued.append(len(self._queue))
            return super().step()

    client = connect(serve(Engine()).server.address)
    futures = []
    for i in range(4):
        futures.append(client.submit(a_score(i)))
        time.sleep(0.02)
    for future in futures:
        future.result(30)
    assert queued == [4, 3, 2, 1]


def test_a_thread_is_roused_once_for_all_that_came_before_it_looked() -> None:
    wakeup, poller = Wakeup(), zmq.Poller()
    poller.register(wakeup.fileno(), zmq.POLLIN)
    for _ in range(2):
        assert not poller.poll(0)
        for _ in range(100_000):  # more than a socket holds
            wakeup.set()
        assert poller.poll(1000)
        wakeup.clear()
    wakeup.close()


@pytest.mark.parametrize("top_k", [0, 1, 4, VOCABULARY, FULL_VOCABULARY])
def test_scores_are_the_tables(serve: Serve, connect: Connect, top_k: int) -> None:
    client = connect(serve().server.address, top_k=top_k)
    requests = [a_score(i, top_k, 1 + i, 8 - i, temperature) for i in range(5) for temperature in (1.0, 0.5)]
    for request, future in [(r, client.submit(r)) for r in requests]:
        target = future.result(30)
        assert_same(target, expected(request))
        assert target.ids.shape == (request.n_positions, min(top_k, VOCABULARY))


def test_requests_wait_while_the_engine_sleeps(serve: Serve, connect: Connect) -> None:
    """What is under way is finished first, and the server goes on saying that it lives."""
    engine = TableEngine(60.0)
    server = serve(engine).server
    client = connect(server.address, top_k=4, heartbeat_s=0.1, request_timeout_s=60.0)
    before = client.submit(a_score(1, 4))
    assert eventually(lambda: server.progress()[1] == 1)  # it is under way
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(server.sleep, 60)
        assert eventually(lambda: not server._commands.empty())
        engine.hurry.set()
        waiting.result(60)
    assert server.counts["answered"] == 1
    assert_same(before.result(30), expected(a_score(1, 4)))
    during = client.submit(a_score(2, 4))
    time.sleep(0.3)  # three heartbeats
    assert not during.done()
    server.wake(30)
    assert_same(during.result(30), expected(a_score(2, 4)))


def test_whoever_waits_for_the_engine_to_sleep_hears_at_once_that_it_ended(serve: Serve, connect: Connect) -> None:
    engine = TableEngine(30)
    running = serve(engine)
    client = connect(running.server.address, top_k=4)
    client.submit(ScoreRequest(np.array([POISON, 1], np.int32), ((1, 2),), 1))
    assert eventually(lambda: running.server.progress()[1] == 1)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(running.server.sleep, 60)
        assert eventually(lambda: not running.server._commands.empty())
        engine.hurry.set()
        for _ in range(2):  # one that was there before the end, and one that comes after it
            with pytest.raises(RunFailed, match="has ended"):
                waiting.result(20)
            waiting = pool.submit(running.server.wake, 60)


class RecordedActivity(Activity):
    """Keeps the changes of what the process does, and with which weights."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[str | None, int | None]] = []

    def switch(self, name: str | None, version: int | None = None) -> tuple[str | None, int | None]:
        before = super().switch(name, version)
        if name != before[0]:
            self.changes.append((name, version))
        return before


def test_a_server_that_waits_for_requests_is_not_busy(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    activity, during_steps = RecordedActivity(), []
    score, nothing = ("score", 0), (None, None)  # with the weights that it was loaded with
    monkeypatch.setattr("gkd.scoring.server.HERE", activity)

    class Engine(TableEngine):
        def step(self) -> Iterator[tuple[int, Any]]:
            during_steps.append(activity.changes[-1])
            return super().step()

    client = connect(serve(Engine()).server.address, top_k=4)
    for n_answered in (1, 2):
        client.submit(a_score(n_answered, 4)).result(30)
        assert eventually(lambda: activity.changes[-1] == nothing)  # it waits for the next
        assert activity.changes == [score, nothing] * n_answered
    assert during_steps == [score, score]


def test_generation_is_the_tables(serve: Serve, connect: Connect) -> None:
    request = GenerateRequest(np.array([3], np.int32), 9)
    np.testing.assert_array_equal(connect(serve().server.address).submit(request).result(30), greedy(request))


def test_a_student_with_fewer_rows_gets_none_beyond_them(serve: Serve, connect: Connect) -> None:
    client = connect(serve().server.address, top_k=FULL_VOCABULARY, vocabulary=VOCABULARY - 1)
    request = a_score(0, FULL_VOCABULARY)
    target = client.submit(request).result(30)
    assert target.ids.shape[1] == VOCABULARY - 1 and target.ids.max() == VOCABULARY - 2
    assert_same(target, expected(replace(request, vocabulary=VOCABULARY - 1)))


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (a_score(n_prompt=60, n_response=41), "too_long", "101 tokens, .*100"),
        (ScoreRequest(np.array([1, 2, 32], np.int32), ((1, 3),), 1), "out_of_vocabulary", "token 32 at position 2"),
        (ScoreRequest(np.array([-1, 2], np.int32), ((1, 2),), 1), "out_of_vocabulary", "token -1 at position 0"),
        (a_score(top_k=20), "k_too_large", "K=20, .*16"),
        (ScoreRequest(np.arange(4, dtype=np.int32), (), 1), "bad_request", "no position"),
        (
            ScoreRequest(np.arange(4, dtype=np.int32), ((0, 2),), 1),
            "bad_request",
            "positions 0 to 2 of 4 tokens after 0",
        ),
        (
            ScoreRequest(np.arange(4, dtype=np.int32), ((2, 2),), 1),
            "bad_request",
            "positions 2 to 2 of 4 tokens after 0",
        ),
        (
            ScoreRequest(np.arange(4, dtype=np.int32), ((1, 5),), 1),
            "bad_request",
            "positions 1 to 5 of 4 tokens after 0",
        ),
        (
            ScoreRequest(np.arange(4, dtype=np.int32), ((2, 3), (1, 4)), 1),
            "bad_request",
            "positions 1 to 4 of 4 tokens after 3",
        ),
        (GenerateRequest(np.array([1], np.int32), 100), "too_long", "101 tokens"),
        (GenerateRequest(np.array([], np.int32), 1), "bad_request", "is empty"),
    ],
)
def test_a_sample_that_cannot_be_scored_is_refused_and_the_server_lives_on(
    serve: Serve, connect: Connect, request_: Any, code: str, message: str
) -> None:
    running = serve(TableEngine(max_top_k=16))
    client = connect(running.server.address)
    with pytest.raises(ScorerRejected, match=message) as rejected:
        client.submit(request_).result(30)
    assert rejected.value.code == code
    assert client.counts.get("retried", 0) == 0
    assert_same(client.submit(a_score()).result(30), expected(a_score()))
    assert running.server.counts[code] == 1


def test_what_an_engine_cannot_serve_is_refused_and_the_server_lives_on(serve: Serve, connect: Connect) -> None:
    """As InferenceEngine.add states it: an engine of one's own may have limits that Limits do not know."""

    class Engine(TableEngine):
        def add(self, key: int, request: Any) -> None:
            if request.token_ids[0] == POISON:
                raise ValueError(f"token {POISON} comes first")
            super().add(key, request)

    running = serve(Engine())
    client = connect(running.server.address)
    with pytest.raises(ScorerRejected, match=f"token {POISON}") as rejected:
        client.submit(ScoreRequest(np.array([POISON, 1], np.int32), ((1, 2),), 1)).result(30)
    assert rejected.value.code == "bad_request"
    assert_same(client.submit(a_score()).result(30), expected(a_score()))
    assert running.server.progress()[1] == 0 and running.engine.worked_on == 1


def test_a_heartbeat_is_answered_while_the_engine_is_busy(serve: Serve, connect: Connect, dealer: Any) -> None:
    running = serve(TableEngine(delay_s=60.0))
    slow = connect(running.server.address, request_timeout_s=60.0).submit(a_score())
    time.sleep(0.2)
    socket = dealer(running.server.address)
    for body, answer in [
        (wire.Ping(), wire.Pong("", 0)),  # as to a client whose connection broke and came back
        (wire.Hello(wire.PROTOCOL), running.server._frontend._welcome()),
        (wire.Ping(), wire.Pong(running.server._frontend.session, 0)),
    ]:
        socket.send(wire.encode(body))
        assert wire.decode(socket.recv())[0] == answer
    assert not slow.done()
    running.engine.hurry.set()
    slow.result(30)


def test_an_expired_request_is_answered_without_work(serve: Serve, connect: Connect, dealer: Any) -> None:
    running = serve(TableEngine(delay_s=60.0, capacity=1))
    busy = connect(running.server.address, request_timeout_s=60.0).submit(a_score())
    assert eventually(lambda: running.server.progress()[1] == 1)
    socket = dealer(running.server.address)
    greet(socket)
    socket.send(wire.encode_request(7, 0.05, a_score()))
    assert eventually(lambda: running.server._frontend._clients._order)  # its time has begun
    time.sleep(0.2)
    running.engine.hurry.set()
    body, _ = wire.decode(socket.recv())
    assert isinstance(body, wire.Error) and (body.id, body.code) == (7, "expired")
    busy.result(30)
    assert running.engine.worked_on == 1


def test_requests_join_the_engine_while_it_works(serve: Serve, connect: Connect) -> None:
    running, steps = serve(TableEngine(delay_s=60.0)), threading.Semaphore(0)
    running.engine.hurry = SimpleNamespace(
        wait=lambda timeout_s: steps.acquire(timeout=timeout_s), set=lambda: steps.release(100)
    )
    client = connect(running.server.address)
    futures = [client.submit(a_score(i)) for i in range(3)]
    steps.release()
    futures[0].result(30)
    late = client.submit(a_score(9))  # the first answer is out while others are still being worked on
    assert not futures[2].done()
    steps.release(3)
    late.result(30)


def test_an_engine_failure_reaches_every_client_and_the_caller(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gkd.scoring.frontend.GRACE_S", 20.0)
    running = serve()
    client = connect(running.server.address, max_attempts=1)
    client.connect(30)
    running.server.sleep(30)  # so that it has both when it fails
    futures = [client.submit(ScoreRequest(np.array([POISON, 1], np.int32), ((1, 2),), 1)), client.submit(a_score())]
    assert eventually(lambda: n_queued(running.server) == 2)
    running.server.wake(30)
    for future in futures:
        with pytest.raises(RunFailed, match=r"engine: .*ValueError: poisoned"):
            future.result(30)
    client.close()
    running.thread.join(30)
    assert "poisoned" in str(running.failure[0])


def test_stopping_refuses_what_is_unfinished_and_frees_the_port(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gkd.scoring.frontend.GRACE_S", 1.0)
    running = serve(TableEngine(delay_s=60.0))
    client = connect(running.server.address, max_attempts=1, request_timeout_s=60.0)
    client.connect(30)
    running.server.sleep(30)  # so that the engine begins with all four, however far apart they come
    futures = [client.submit(a_score(i)) for i in range(4)]
    assert eventually(lambda: n_queued(running.server) == 4)
    running.server.wake(30)
    assert eventually(lambda: running.server.progress()[1] == 4)
    running.end()  # which lets the engine finish the first
    futures[0].result(30)
    with pytest.raises(RunFailed, match="is stopping"):
        futures[3].result(30)
    again = serve(port=running.port)
    assert again.server.address == running.server.address


def test_a_server_whose_clients_have_left_waits_for_nobody(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gkd.scoring.frontend.GRACE_S", 600.0)
    running = serve()
    client = connect(running.server.address)
    client.submit(a_score()).result(30)
    client.close()
    running.end()


def test_a_port_in_use_is_named(serve: Serve) -> None:
    running = serve()
    with pytest.raises(ConfigError, match=f"{running.server.address}: Address already"):
        serve(port=running.port)


def test_arbitrary_bytes_never_crash_the_server(serve: Serve, connect: Connect, dealer: Any) -> None:
    running = serve(TableEngine(max_length=8, poison=None))
    socket = dealer(running.server.address)
    greet(socket)
    client = connect(running.server.address)
    client.connect(30)
    real = wire.encode_request(1, 1.0, a_score(n_prompt=2, n_response=3))
    number = st.integers(-9, 40) | st.floats() | st.none()
    names = ["id", "remaining_s", "n_prompt", "top_k", "temperature", "vocabulary", "max_tokens", "protocol"]
    kinds = st.sampled_from(["score", "generate", "score_reply", "hello", "ping", "nonsense"])
    bodies = st.fixed_dictionaries({"type": kinds}, optional=dict.fromkeys(names, number))
    header = st.tuples(bodies, st.just([("<i4", [2])])).map(msgspec.msgpack.encode)
    framed = st.tuples(header, st.binary(min_size=8, max_size=8)).map(
        lambda t: struct.pack("<I", len(t[0])) + t[0] + bytes(-len(t[0]) % 4) + t[1]
    )
    damaged = st.tuples(st.integers(0, 200), st.binary(max_size=3)).map(
        lambda t: real[: t[0]] + t[1] + real[t[0] + len(t[1]) :]
    )

    @settings(
        max_examples=300,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(st.binary(max_size=40) | framed | damaged)
    def send(frame: bytes) -> None:
        socket.send(frame)
        assert running.thread.is_alive()

    send()
    # Messages of one connection are answered in order, so this answer is the last.
    socket.send(wire.encode_request(10**9, 1.0, a_score(n_prompt=9)))
    last: list[wire.Message] = []
    while not any(isinstance(body, wire.Error) and body.id == 10**9 for body in last):
        last = [wire.decode(frame)[0] for frame in wire.unpack(socket.recv())]
    assert_same(
        client.submit(a_score(n_prompt=3, n_response=5)).result(30), expected(a_score(n_prompt=3, n_response=5))
    )
    assert running.server.counts["bad_request"] > 50
    assert not running.failure


def test_a_message_that_cannot_be_read_is_answered(serve: Serve, dealer: Any) -> None:
    socket = dealer(serve().server.address)
    socket.send(b"\x00garbage")
    body, _ = wire.decode(socket.recv())
    assert isinstance(body, wire.Error) and (body.id, body.code) == (None, "bad_request")


@pytest.mark.parametrize("max_length", [30, 48, 100, 1000])
def test_requests_at_one_time_go_together_and_so_do_their_answers(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch, max_length: int
) -> None:
    """Whatever the server takes at most: requests fill it to the last byte."""
    sizes: list[int] = []
    unpack = wire.unpack

    def counted(frame: bytes) -> list[bytes]:
        frames = unpack(frame)
        sizes.append(len(frames))
        return frames

    client = connect(serve(TableEngine(capacity=64, max_length=max_length)).server.address, max_length=max_length)
    client.connect(30)
    monkeypatch.setattr(wire, "unpack", counted)
    monkeypatch.setattr(client, "_poll", lambda poll=client._poll: (time.sleep(0.1), poll()))
    futures = [client.submit(a_score(i)) for i in range(64)]
    for i, future in enumerate(futures):
        assert_same(future.result(30), expected(a_score(i)))
    assert sum(sizes) >= 128 and max(sizes) >= 16


def test_many_threads_may_ask_at_once(serve: Serve, connect: Connect) -> None:
    client = connect(serve(TableEngine(capacity=4)).server.address, request_timeout_s=20.0)
    wrong: list[int] = []

    def ask(start: int) -> None:
        for seed in range(start, start + 50):
            target = client.submit(a_score(seed)).result(20)
            if not np.array_equal(target.ids, expected(a_score(seed)).ids):
                wrong.append(seed)

    threads = [threading.Thread(target=ask, args=(1000 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong and client.counts.get("retried", 0) == 0
