"""Servers that are killed, stopped and started again."""

from __future__ import annotations

import signal
import time

import pytest

from gkd.inference.requests import ScorerUnavailable
from tests.e2e.on_a_cluster.conftest import free_port
from tests.ray.cluster.conftest import eventually
from tests.scoring.conftest import Connect, Serve, Spawn, a_score, all_right


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_what_a_lost_replica_had_goes_to_the_other(spawn: Spawn, serve: Serve, connect: Connect, number: int) -> None:
    lost, other = spawn(delay_s=1.0), serve()
    client = connect(lost.address, other.server.address, request_timeout_s=600.0)
    client.connect(30)
    futures = [client.submit(a_score(i)) for i in range(10)]
    time.sleep(0.3)
    lost.signal(number)
    assert all_right(futures, 60.0)  # by heartbeats, long before the request's own time is over
    assert client.counts["lost"] == 1 and client.counts["retried"] >= 1


def test_a_replica_that_is_killed_is_missed_at_once(spawn: Spawn, serve: Serve, connect: Connect) -> None:
    """Before any heartbeat is due."""
    lost, other = spawn(delay_s=600.0), serve()
    client = connect(lost.address, other.server.address, request_timeout_s=600.0, heartbeat_s=600.0)
    client.connect(30)
    futures = [client.submit(a_score(i)) for i in range(10)]
    assert eventually(lambda: all(future.done() for future in futures[1::2]))
    lost.kill()
    assert all_right(futures, 60.0)


def test_a_server_that_comes_back_on_its_port_is_used_again(spawn: Spawn, connect: Connect) -> None:
    first = spawn(free_port(), delay_s=0.2)  # one that nobody is given meanwhile
    client = connect(first.address, request_timeout_s=60.0)
    client.connect(30)
    futures = [client.submit(a_score(i)) for i in range(5)]
    futures[0].result(30)
    first.kill()
    spawn(first.port)
    assert all_right(futures)


def test_a_stopped_server_that_goes_on_is_used_again(spawn: Spawn, connect: Connect) -> None:
    server = spawn()
    client = connect(server.address, request_timeout_s=60.0)
    client.connect(30)
    server.signal(signal.SIGSTOP)
    futures = [client.submit(a_score(i)) for i in range(5)]
    assert eventually(lambda: client.counts.get("lost", 0) == 1)
    assert not any(f.done() for f in futures)
    server.signal(signal.SIGCONT)
    assert all_right(futures)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_any_replica_a_request_fails_in_time(spawn: Spawn, connect: Connect, number: int) -> None:
    servers = [spawn(delay_s=5.0), spawn(delay_s=5.0)]
    client = connect(*(s.address for s in servers), request_timeout_s=1.0)
    client.connect(30)
    for server in servers:
        server.signal(number)
    with pytest.raises(ScorerUnavailable, match=r"teacher after \d") as failure:
        client.submit(a_score()).result(60)
    assert all(s.address in str(failure.value) for s in servers)
