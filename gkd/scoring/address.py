"""Where scorers are, and the key that their clients have to have."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import AF_INET6, SOCK_STREAM, getaddrinfo
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.auth import load_certificate

from gkd import durable
from gkd.config import Teacher, user_path
from gkd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Key:
    """A CURVE key pair, Z85 text, that server and clients share; peers that have it are served."""

    public: bytes
    secret: bytes = field(repr=False)

    @staticmethod
    def generate() -> Key:
        """Make a new pair."""
        return Key(*zmq.curve_keypair())

    @staticmethod
    def load(path: str | Path) -> Key:
        """Read a pair. Raises ConfigError when there is none in the file."""
        try:
            public, secret = load_certificate(path)
            if secret is not None and zmq.curve_public(secret) == public:
                return Key(public, secret)
        except OSError as error:
            reason = error.strerror or "no such file"
            raise ConfigError(f"teacher.key_file={path}: cannot be read ({reason})") from None
        except (ValueError, zmq.ZMQError):
            pass  # as for a pair that does not belong together
        raise ConfigError(f"teacher.key_file={path}: holds no pair of CURVE keys")

    @staticmethod
    def load_or_create(path: str | Path) -> Key:
        """Read a pair, or write a new one that only its owner may read. Raises ConfigError."""
        key = Key.generate()
        # The format of ZeroMQ's certificates. zmq.auth.create_certificates would write two files that others may read,
        # over a pair that somebody else is just writing.
        text = f'curve\n    public-key = "{key.public.decode()}"\n    secret-key = "{key.secret.decode()}"\n'
        try:
            if not durable.create_secret(Path(path), text):
                return Key.load(path)
        except OSError as error:
            raise ConfigError(f"teacher.key_file={path}: cannot be written ({error.strerror})") from None
        return key


def endpoint(host: str, port: int) -> str:
    """Return ``tcp://host:port``, with the brackets an IPv6 address needs."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is this machine alone. A name other than localhost is not resolved and counts as
    another's.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def has_only_ipv6(host: str) -> bool:
    """Return whether ``host`` is an IPv6 address, or a name that stands for no other. One that is unknown has others.

    ZeroMQ looks a name up as one kind alone, and with its option for IPv6 would reach no server that has both kinds of
    addresses and listens on IPv4. May take seconds where names are looked up on a network.
    """
    try:
        return {info[0] for info in getaddrinfo(host, None, type=SOCK_STREAM)} == {AF_INET6}
    except (OSError, UnicodeError):
        return False


def key_path(teacher: Teacher, hosts: Sequence[str]) -> Path:
    """Return the file of the key for servers at ``hosts`` that are started by themselves.

    Those on this machine have one of this user's own where none is named. Raises ConfigError where one that can be
    reached from elsewhere has none.
    """
    if teacher.key_file is not None:
        return user_path(teacher.key_file)
    for host in hosts:
        if not is_loopback(host):
            raise ConfigError(f"the teacher's address {host} is not loopback and has no key: set teacher.key_file")
    try:
        return Path("~/.cache/gkd/teacher.key").expanduser()
    except RuntimeError:
        raise ConfigError("teacher.key_file: there is no home directory that holds a key; name a file") from None


def host_of(address: str) -> str:
    """Return the host of a ``tcp://host:port`` address. Raises ConfigError when it is none."""
    try:
        parts = urlsplit(address)
        if parts.scheme == "tcp" and re.fullmatch(r"[\w.:-]+", parts.hostname or "") and parts.port:
            return str(parts.hostname)
    except ValueError:
        pass
    raise ConfigError(f"{address!r} is no address of a scorer: expected tcp://HOST:PORT")


def external_addresses(teacher: Teacher) -> list[str]:
    """Return addresses of the external teacher in ``teacher.server_ip``; hosts without a port have
    ``teacher.server_port``. An IPv6 address with a port stands in brackets.

    Raises ConfigError for what is no host.
    """
    addresses = []
    for entry in (teacher.server_ip or "").split(","):
        host, colon, _ = entry.strip().rpartition(":")
        has_port = colon and (":" not in host or host.endswith("]"))
        address = f"tcp://{entry.strip()}" if has_port else endpoint(entry.strip().strip("[]"), teacher.server_port)
        try:
            host_of(address)
        except ConfigError:
            raise ConfigError(
                f"teacher.server_ip={teacher.server_ip}: {entry.strip()!r} is neither HOST nor HOST:PORT of gkd "
                "serve-teacher (vLLM's own server does not give what is learned from)"
            ) from None
        addresses.append(address)
    return addresses


def external_key(teacher: Teacher) -> Key:
    """Return the key of the external teacher. Raises ConfigError."""
    return Key.load(key_path(teacher, [host_of(address) for address in external_addresses(teacher)]))


def secure_server(socket: Any, key: Key) -> None:
    """Make ``socket`` accept only peers that hold ``key``. Its context needs a gatekeeper, see zap."""
    socket.curve_secretkey, socket.curve_publickey, socket.curve_server = key.secret, key.public, True
    socket.zap_domain = b"gkd"


def secure_client(socket: Any, key: Key) -> None:
    """Make ``socket`` prove that it holds ``key``, and accept only a server that does."""
    socket.curve_secretkey, socket.curve_publickey, socket.curve_serverkey = key.secret, key.public, key.public
