"""Clients that want too much: what they get is bounded, and the others are served meanwhile.

The servers are processes of their own, so that their memory can be measured; their limits are small, and the attacks
in proportion.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

import numpy as np
import pytest

from gkd.inference.requests import RequestRejected, ScoreRequest
from gkd.scoring import wire
from gkd.scoring.client import ScoringClient
from gkd.scoring.clients import Clients, QueuedRequest
from gkd.scoring.connections import ClientLimits, Connection
from tests.ray.cluster.conftest import eventually
from tests.scoring.conftest import Connect, Serve, a_score, all_right, greet
from tests.scoring.table import TableEngine, expected

MIB = 1 << 20


def answers(client: ScoringClient) -> bool:
    return all_right([client.submit(a_score(0))], 30)


def served_for(client: ScoringClient, seconds: float) -> None:
    """The client is answered all the time, and its replica is never out."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert answers(client)
    assert client.counts.get("lost", 0) == 0 and client.counts.get("retried", 0) == 0


def test_a_client_that_reads_nothing_for_long_is_cut_off(serve: Serve, connect: Connect, dealer: Any) -> None:
    client_limits = ClientLimits(unread_bytes=MIB, unread_s=0.2)
    running = serve(TableEngine(max_length=20_000), client_limits=client_limits)
    attacker = dealer(running.server.address, rcvhwm=1, rcvbuf=4096)
    greet(attacker)
    for id in range(10):
        attacker.send(wire.encode_request(id, 60.0, a_score(top_k=32, n_prompt=1, n_response=19_000)))
    assert eventually(lambda: running.server.counts.get("cut_unread", 0) > 0)
    assert answers(connect(running.server.address))


def test_answers_larger_than_the_bound_come_one_after_the_other(serve: Serve, connect: Connect) -> None:
    running = serve(
        TableEngine(max_length=20_000), client_limits=ClientLimits(unread_bytes=MIB, unread_bytes_in_all=MIB)
    )
    client = connect(running.server.address, request_timeout_s=30.0, top_k=32, max_length=20_000)
    requests = [a_score(i, 32, 1, 9_000) for i in range(6)]
    for request, future in [(r, client.submit(r)) for r in requests]:
        np.testing.assert_array_equal(future.result(30).ids, expected(request).ids)
    assert client.counts.get("retried", 0) == 0


def test_a_kernel_that_counts_no_bytes_costs_no_client_its_connection(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "_counter", lambda connection, offset: 0)
    running = serve(client_limits=ClientLimits(unread_s=0.1, unread_bytes=4096))
    client = connect(running.server.address, heartbeat_s=60.0, request_timeout_s=30.0)
    served_for(client, 0.5)
    assert not {name for name in running.server.counts if name.startswith("cut_")}


def test_heartbeats_that_nobody_reads_are_cut_off(serve: Serve, dealer: Any) -> None:
    running = serve()
    attacker = dealer(running.server.address, rcvhwm=1, rcvbuf=4096, sndhwm=0)
    ping = wire.encode(wire.Ping())
    end = time.monotonic() + 30
    while not running.server.counts.get("cut_unread", 0) and time.monotonic() < end:
        for _ in range(2000):
            attacker.send(ping)
        time.sleep(0.02)
    assert running.server.counts["cut_unread"] >= 1


@pytest.mark.parametrize("authenticated", [True, False])
def test_idle_connections_make_room(serve: Serve, connect: Connect, dealer: Any, authenticated: bool) -> None:
    running = serve(client_limits=ClientLimits(connections=20, greeting_s=600.0))
    # It misses no heartbeat of a server that is slow: what it loses is its connection.
    early = connect(running.server.address, heartbeat_s=60.0, request_timeout_s=30.0)
    assert answers(early)
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            if authenticated:
                dealer(running.server.address, reconnect_ivl=-1)
            else:
                stack.enter_context(socket.create_connection(("127.0.0.1", running.port), 10))
        late = connect(running.server.address, request_timeout_s=30.0)
        assert answers(late) and answers(early)
        assert eventually(lambda: len(running.server._frontend._connections._by_fd) <= 20)
        assert early.counts.get("lost", 0) == 0


def test_a_descriptor_that_is_something_elses_by_now_is_left_alone() -> None:
    """ZeroMQ reports a connection by its descriptor's number, which may be another's when that is read."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        port = listener.getsockname()[1]
        ours, theirs = socket.socketpair()
        with ours, theirs, socket.create_connection(other.getsockname()) as outside, other.accept()[0] as elsewhere:
            for not_ours in (ours, outside, elsewhere):
                with pytest.raises(OSError, match=str(port)):
                    Connection(not_ours.fileno(), port)
            ours.send(b"!")
            assert theirs.recv(1) == b"!"
        with socket.create_connection(listener.getsockname()) as peer, listener.accept()[0] as accepted:
            connection = Connection(accepted.fileno(), port)
            connection.cut()
            assert peer.recv(1) == b""
            connection.close()


@pytest.mark.parametrize("greeting", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64)])
def test_a_peer_without_the_key_is_disconnected(serve: Serve, greeting: bytes) -> None:
    running = serve(client_limits=ClientLimits(greeting_s=0.2))
    with socket.create_connection(("127.0.0.1", running.port), 10) as peer:
        peer.sendall(greeting)
        peer.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            while peer.recv(4096):
                pass  # ZeroMQ's own greeting
    assert running.thread.is_alive()


def test_a_client_that_says_nothing_any_more_is_disconnected(serve: Serve, dealer: Any) -> None:
    running = serve(client_limits=ClientLimits(silent_s=0.3))
    silent = dealer(running.server.address, reconnect_ivl=-1)
    silent.send(wire.encode(wire.Ping()))
    assert silent.recv()
    assert eventually(lambda: running.server.counts.get("cut_silent", 0) == 1)


def test_clients_take_turns(serve: Serve, connect: Connect, dealer: Any) -> None:
    running = serve(TableEngine(delay_s=0.02, capacity=1))
    greedy = dealer(running.server.address)
    greet(greedy)
    for id in range(500):
        greedy.send(wire.encode_request(id, 60.0, a_score(id)))
    assert greedy.recv()  # the first answer: the rest is in the queue
    client = connect(running.server.address, request_timeout_s=30.0)
    client.connect(30)
    futures = [client.submit(a_score(i)) for i in range(2)]
    assert all_right(futures, 30)
    assert running.engine.worked_on < 250  # of 500, which are before them in time


def test_a_client_with_too_much_in_the_queue_is_refused_and_retries(serve: Serve, connect: Connect) -> None:
    client_limits = ClientLimits(queued_bytes=40_000)
    running = serve(TableEngine(delay_s=60.0, capacity=64), client_limits=client_limits)
    client = connect(running.server.address, max_attempts=1, request_timeout_s=30.0)
    client.connect(30)
    futures = [client.submit(a_score(i)) for i in range(200)]
    assert eventually(lambda: running.server.counts.get("busy", 0) > 0)
    running.engine.hurry.set()
    assert all_right(futures, 30)
    assert client.counts["busy"] == running.server.counts["busy"] > 0
    assert client.counts.get("retried", 0) == 0


def test_where_the_queue_is_full_in_all_everyone_has_a_share(serve: Serve, dealer: Any) -> None:
    client_limits = ClientLimits(queued_bytes=100_000, queued_bytes_in_all=100_000)
    running = serve(TableEngine(delay_s=60.0, capacity=1), client_limits=client_limits)
    first, second = dealer(running.server.address), dealer(running.server.address)
    greet(first)
    greet(second)
    for id in range(200):
        first.send(wire.encode_request(id, 60.0, a_score(id)))
    body = wire.decode(first.recv())[0]
    assert isinstance(body, wire.Error) and body.code == "busy"
    for id in range(20):  # far less than half of all
        second.send(wire.encode_request(id, 60.0, a_score(id)))
    second.send(wire.encode(wire.Ping()))
    assert isinstance(wire.decode(second.recv())[0], wire.Pong)


def test_where_all_together_have_too_much_in_the_queue_each_may_have_a_share() -> None:
    clients = Clients(ClientLimits(queued_bytes=100, queued_bytes_in_all=120), expired=lambda job: None)
    ids = (b"a", b"b", b"c")
    for id in ids:
        clients.add(id, connection=None)  # type: ignore[arg-type]

    def accepted(client: bytes) -> int:
        for n in range(100):
            try:
                clients.put(QueuedRequest(client, n, np.inf, a_score(), request_bytes=10, answer_bytes=10))
            except RequestRejected as rejected:
                assert rejected.code == "busy"
                return n
        return 100

    assert [accepted(id) for id in ids] == [10, 4, 4]  # of all that there may be, a third is 40 bytes


def test_the_engine_is_given_no_more_for_a_client_than_it_may_leave_unread() -> None:
    """What the engine works on counts: its answers come all at once."""
    clients = Clients(ClientLimits(unread_bytes=100), expired=lambda job: None)
    clients.add(b"a", connection=None)  # type: ignore[arg-type]
    for n in range(3):
        clients.put(QueuedRequest(b"a", n, np.inf, a_score(), request_bytes=10, answer_bytes=60))
    (first,) = clients.take(3, 0.0)
    assert clients.take(3, 0.0) == []
    assert clients.count_out(b"a", 0, first)
    assert [job.id for job in clients.take(3, 0.0)] == [1]


def test_a_request_longer_than_the_server_reads_is_refused_here(serve: Serve, connect: Connect) -> None:
    """The server would hang up on it without a word."""
    client = connect(serve().server.address)
    with pytest.raises(Exception, match=r"50001 tokens, .*100") as rejected:
        client.submit(ScoreRequest(np.ones(50_001, np.int32), ((1, 50_001),), 1)).result(30)
    assert rejected.value.code == "too_long"
    assert answers(client) and client.counts.get("lost", 0) == 0
