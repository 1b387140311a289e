"""TCP ports of this machine: one that is free, and whether a certain one is."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port that was free a moment ago, on every interface of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Return whether a program could listen on ``port``; one that has just been given up counts as free."""
    return find_bind_error("0.0.0.0", port) is None


def find_bind_error(host: str, port: int) -> str | None:
    """Return why nobody can listen at ``host:port`` now, in the system's words; None where one can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except (OSError, UnicodeError) as error:  # the latter of a name that no host can have
        return getattr(error, "strerror", None) or str(error)
    return None


def listens(address: str, timeout_s: float) -> bool:
    """Return whether something takes connections at ``address`` (host:port) within ``timeout_s``."""
    try:
        connect(address, timeout_s)
    except OSError:
        return False
    return True


def connect(address: str, timeout_s: float) -> None:
    """Connect to ``address`` (host:port), and hang up. Raises OSError where nothing answers within ``timeout_s``."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
