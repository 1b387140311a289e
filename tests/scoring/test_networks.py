"""Networks between client and server that are slow, or lead to another server from one moment to the next."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from gkd.errors import ConfigError
from gkd.scoring.connections import ClientLimits
from gkd.scoring.frontend import _router
from gkd.scoring.replica import MISSED_BEATS, Replica
from tests.ray.cluster.conftest import eventually
from tests.scoring.conftest import Connect, Serve, a_score
from tests.scoring.table import KEY, TableEngine, expected
from tests.scoring.test_server import assert_same

CHUNK = 1 << 16


class Relay:
    """Hands on what comes to its address, and what comes back at ``bytes_per_s``."""

    def __init__(self, server: str, bytes_per_s: float = 1e12) -> None:
        self.server, self.bytes_per_s = server, bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def n_connections(self) -> int:
        """Connections so far."""
        return len(self._open) // 2

    def cut(self) -> None:
        """End all connections; new ones are accepted at once."""
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(10)
        self.cut()
        for thread in self._threads:
            thread.join(10)
        for end in (self._listener, *self._open):
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", int(self.server.rsplit(":", 1)[1])))
                self._open += [client, server]
                for source, sink, slow in ((client, server, False), (server, client, True)):
                    self._threads.append(threading.Thread(target=self._hand_on, args=(source, sink, slow)))
                    self._threads[-1].start()

    def _hand_on(self, source: socket.socket, sink: socket.socket, slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                sink.sendall(data)
                if slow:
                    time.sleep(len(data) / self.bytes_per_s)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relay() -> Iterator[Callable[..., Relay]]:
    relays: list[Relay] = []

    def make(server: str, bytes_per_s: float = 1e12) -> Relay:
        relays.append(Relay(server, bytes_per_s))
        return relays[-1]

    yield make
    for each in relays:
        each.close()


def has_ipv6_loopback() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no address ::1")
def test_ipv6_serves(serve: Serve, connect: Connect) -> None:
    running = serve(host="::1")
    assert running.server.address == f"tcp://[::1]:{running.port}"
    client = connect(running.server.address)
    assert_same(client.submit(a_score(1)).result(30), expected(a_score(1)))


@pytest.mark.parametrize(
    ("kinds", "is_looked_up"),
    [
        ([socket.AF_INET6, socket.AF_INET6], True),
        ([socket.AF_INET6, socket.AF_INET], False),  # a server may listen on the latter alone
        ([socket.AF_INET], False),
        ([], False),
    ],
)
def test_a_name_of_ipv6_addresses_alone_is_looked_up_as_such(
    kinds: list[int], is_looked_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ by itself looks for IPv4 alone, where the client then waits for a server that it never finds."""

    def look_up(host: str, *_: object, **__: object) -> list[tuple[int]]:
        assert host == "teacher.example"
        if not kinds:
            raise socket.gaierror
        return [(kind,) for kind in kinds]

    monkeypatch.setattr("gkd.scoring.address.getaddrinfo", look_up)
    replica = Replica("tcp://teacher.example:15555", KEY, 1.0, 1, 1 << 20, "teacher")
    assert replica.socket.ipv6 == is_looked_up
    replica.close()
    with zmq.Context() as context, _router(context, "teacher.example", KEY, 1 << 20, ClientLimits()) as router:
        assert router.ipv6 == is_looked_up


def test_an_answer_that_takes_longer_than_all_heartbeats_arrives(
    serve: Serve, connect: Connect, relay: Callable[..., Relay]
) -> None:
    """5 MB at 3 MB/s: the answer to every heartbeat is behind them."""
    running = serve(TableEngine(max_length=20_000))
    heartbeat_s, request = 0.4, a_score(top_k=32, n_prompt=1, n_response=19_000)
    slow = relay(running.server.address, 3e6)
    client = connect(slow.address, top_k=32, max_length=20_000, heartbeat_s=heartbeat_s, request_timeout_s=1.0)
    client.connect(30)
    began = time.monotonic()
    assert_same(client.submit(request).result(60), expected(request))
    assert time.monotonic() - began > MISSED_BEATS * heartbeat_s
    assert not client.counts["lost"] and not client.counts["retried"]
    assert running.engine.worked_on == 1


def test_a_connection_that_leads_to_another_server_unseen_has_no_answer_from_it(
    serve: Serve, connect: Connect, relay: Callable[..., Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a balancer, while the client has no time on its cores."""
    first, second = serve(weights="1"), serve(weights="2")
    between = relay(first.server.address)
    client = connect(between.address, heartbeat_s=30.0, request_timeout_s=30.0)
    client.connect(30)
    assert_same(client.submit(a_score(1)).result(30), expected(a_score(1)))
    beat = Replica.beat
    monkeypatch.setattr(Replica, "beat", lambda self, now: "")  # it does not look
    between.server = second.server.address
    between.cut()
    assert eventually(lambda: len(second.server._frontend._connections) == 1)
    future = client.submit(a_score(2))
    assert eventually(lambda: second.server.counts.get("not_greeted", 0) > 0)
    monkeypatch.setattr(Replica, "beat", beat)
    with pytest.raises(ConfigError, match="other weights"):
        future.result(30)
    assert not second.engine.worked_on


def test_a_connection_that_was_lost_unseen_is_greeted_on_again(
    serve: Serve, connect: Connect, relay: Callable[..., Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = serve()
    between = relay(running.server.address)
    client = connect(between.address, heartbeat_s=30.0, request_timeout_s=30.0)
    client.connect(30)
    beat = Replica.beat
    monkeypatch.setattr(Replica, "beat", lambda self, now: "")
    n_before = between.n_connections
    between.cut()
    # What is sent before ZeroMQ knows that the old connection ended is lost with it, and asked for again much later.
    assert eventually(lambda: between.n_connections > n_before)
    future = client.submit(a_score(2))
    assert eventually(lambda: running.server.counts.get("not_greeted", 0) > 0)
    monkeypatch.setattr(Replica, "beat", beat)
    assert_same(future.result(30), expected(a_score(2)))
    assert client.counts["lost"] == client.counts["retried"] == 1
