"""Whether a program could listen at an address."""

from __future__ import annotations

import socket

import pytest

from gkd.cluster.session.port import find_bind_error


@pytest.mark.parametrize("host", ["10..0.1", "x" * 64 + ".example", "192.0.2.1"])
def test_an_address_that_is_none_of_this_machine_has_a_reason(host: str) -> None:
    """Also a name that no host can have, of which the codec of names speaks and not the system."""
    assert find_bind_error(host, 0)


def test_a_port_is_free_until_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert find_bind_error("127.0.0.1", server.getsockname()[1])
    assert find_bind_error("127.0.0.1", 0) is None
