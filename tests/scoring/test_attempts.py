"""Servers that cannot be reached, or that end the handshake: what is known of why is stated at once."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator

import pytest

from gkd.inference.requests import ScorerUnavailable
from gkd.scoring.address import Key
from gkd.scoring.attempts import CUT_OFF, NO_ANSWER, NO_CONNECTION, NO_HANDSHAKE, NO_NAME
from tests.e2e.on_a_cluster.conftest import free_port
from tests.error_text import contains_in_order
from tests.ray.cluster.conftest import eventually
from tests.scoring.conftest import Connect, Serve, a_score


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
    place: str, fault: str, serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gkd")
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


def test_a_server_that_ends_one_handshake_and_then_hangs_has_no_other_key(serve: Serve, connect: Connect) -> None:
    first = serve()
    client = connect(first.server.address, request_timeout_s=2.5)
    lines: list[str] = []
    client.on_change = lambda text, is_back: lines.append(text)
    client.connect(30)
    first.end()
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
    first = serve()
    client = connect(first.server.address, request_timeout_s=3.0)
    lines: list[str] = []
    client.on_change = lambda text, is_back: lines.append(text)
    client.connect(30)
    first.end()
    serve(port=first.port, key=Key.generate())
    with pytest.raises(ScorerUnavailable) as caught:
        client.submit(a_score(0)).result(30)
    assert contains_in_order(str(caught.value), first.server.address, NO_HANDSHAKE)
    assert len(lines) == 2 and contains_in_order(lines[1], "teacher", first.server.address, NO_HANDSHAKE)
