"""Servers that cannot be reached, or that end the handshake: what is known of why is stated at once."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator

import pytest
import zmq

from gkd.inference.requests import ScorerUnavailable
from gkd.scoring.address import Key
from gkd.scoring.attempts import CUT_OFF, NO_ANSWER, NO_CONNECTION, NO_HANDSHAKE, NO_NAME, ConnectionAttempts
from gkd.scoring.client import ScoringClient
from tests.e2e.on_a_cluster.conftest import free_port
from tests.error_text import contains_in_order
from tests.ray.cluster.conftest import eventually
from tests.scoring.conftest import Connect, Running, Serve, a_score

ENDED = zmq.EVENT_CONNECT_DELAYED, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_DISCONNECTED


@contextlib.contextmanager
def listening(answer: bytes) -> Iterator[str]:
    """Listen at an address, and answer and hang up as another kind of server does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with contextlib.suppress(OSError):  # it was closed
                while True:
                    with listener.accept()[0] as peer:
                        peer.recv(100)
                        peer.sendall(answer)

        thread = threading.Thread(target=run)
        thread.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("another key", NO_HANDSHAKE),
        ("a server of another kind", NO_HANDSHAKE),
        ("nobody", NO_CONNECTION),
        ("no name", NO_NAME),
    ],
)
def test_why_a_server_does_not_answer_is_known_at_once(
    place: str,
    fault: str,
    serve: Serve,
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "gkd")
    monkeypatch.setattr("gkd.scoring.client.AT_ONCE_S", 0.02)  # so that it looks several times
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as other:
        address = {
            "another key": serve(key=Key.generate()).server.address,
            "a server of another kind": other,
            "nobody": f"tcp://127.0.0.1:{free_port()}",
            "no name": f"tcp://{64 * 'x'}:15555",
        }[place]
        client = connect(address)
        assert eventually(lambda: client.replicas[0].fault == fault)
        with pytest.raises(ScorerUnavailable) as caught:
            client.connect(0.1)
    assert contains_in_order(str(caught.value), address, fault)
    (line,) = caplog.messages
    assert contains_in_order(line, "teacher", address, fault)


def lose_server(serve: Serve, connect: Connect) -> tuple[Running, ScoringClient, list[str]]:
    """Connect to a server that ends; returns both, and a list of the lines that the client has on that."""
    first, lines = serve(), list[str]()
    client = connect(first.server.address, request_timeout_s=2.5)
    client.on_change = lambda text, is_back: lines.append(text)
    client.connect(30)
    first.end()
    return first, client, lines


def test_a_server_that_ends_one_handshake_and_then_hangs_has_no_other_key(serve: Serve, connect: Connect) -> None:
    first, client, lines = lose_server(serve, connect)
    with socket.create_server(("127.0.0.1", first.port)) as listener:
        listener.accept()[0].close()
        with pytest.raises(ScorerUnavailable) as caught:
            client.submit(a_score(0)).result(30)
    assert contains_in_order(str(caught.value), first.server.address, CUT_OFF)
    assert len(lines) == 1


def test_a_new_address_where_nobody_answers_is_said_to_be_silent(serve: Serve, connect: Connect) -> None:
    first = serve()
    client = connect(first.server.address, request_timeout_s=2.0)
    client.connect(30)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        client.expect(first.server.address, 0.0, other)
        with pytest.raises(ScorerUnavailable) as caught:
            client.submit(a_score(0)).result(30)
    assert contains_in_order(str(caught.value), other, NO_ANSWER)


def test_a_server_that_comes_back_with_another_key_is_named(serve: Serve, connect: Connect) -> None:
    first, client, lines = lose_server(serve, connect)
    serve(port=first.port, key=Key.generate())
    with pytest.raises(ScorerUnavailable) as caught:
        client.submit(a_score(0)).result(30)
    assert contains_in_order(str(caught.value), first.server.address, NO_HANDSHAKE)
    assert len(lines) == 2
    assert contains_in_order(lines[1], "teacher", first.server.address, NO_HANDSHAKE, "teacher.request_timeout_s")


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ((), ""),
        ((zmq.EVENT_CONNECT_DELAYED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED), CUT_OFF),
        ((*ENDED, *ENDED), NO_HANDSHAKE),
        ((*ENDED, zmq.EVENT_CONNECT_DELAYED, zmq.EVENT_CLOSED, *ENDED), CUT_OFF),
        ((*ENDED, zmq.EVENT_CONNECT_DELAYED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED, *ENDED), CUT_OFF),
    ],
)
def test_what_events_of_a_connection_mean(events: tuple[int, ...], fault: str) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        attempts = ConnectionAttempts(dealer)
        for event in events:
            attempts._note(event)
        assert attempts.find_fault() == fault
        attempts.close()
