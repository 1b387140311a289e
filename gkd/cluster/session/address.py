"""Is there a Ray cluster at an address, and is it one this Python can join? Answered in bounded time, in one line."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray._raylet  # Ray has no public way to ask for its token

from gkd.cluster.session.port import connect
from gkd.durable import create_secret, reason
from gkd.errors import ConfigError

CONNECT_TIMEOUT_S = 10.0
TOKEN = ".ray/auth_token"  # in the home directory, where Ray looks for it
_PROBE = """
import sys
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
print((client.internal_kv_get(b"CLUSTER_METADATA", b"cluster") or b"{}").decode())
"""


def use_token() -> bool:
    """Show this user's Ray token (RAY_AUTH_TOKEN, ~/.ray/auth_token) to clusters, unless RAY_AUTH_MODE states whether.

    Returns whether there is one, which was not shown before. From then on this process refuses clusters that have none
    themselves, so only for one that asks for it.
    """
    if "RAY_AUTH_MODE" in os.environ or not _has_token():
        return False
    require_token()
    return True


def require_token() -> None:
    """Have this process, and those that it starts, use clusters by their token alone."""
    raylet: Any = ray._raylet
    os.environ["RAY_AUTH_MODE"] = "token"
    raylet.Config.initialize("")  # this process has read the variable already


def create_token() -> None:
    """Write a token for this user's clusters where there is none, and let nobody else read it. Raises ConfigError.

    Ray would leave it to everyone on the machine, and a cluster does whatever its holders send.
    """
    try:
        if not _has_token():
            create_secret(Path.home() / TOKEN, secrets.token_hex(32))
            _loader().reset_cache()
        elif "RAY_AUTH_TOKEN" not in os.environ and (Path.home() / TOKEN).is_file():
            (Path.home() / TOKEN).chmod(0o600)
    except (OSError, RuntimeError) as error:  # the latter where there is no home
        home = os.environ.get("HOME", "")
        raise ConfigError(f"HOME={home}: no place for the token of this user's clusters ({reason(error)})") from None


def use_own_token() -> None:
    """Have a private Ray, which this process is about to start, take a token of its own where the user has none.

    Ray would write one into the home directory, which may be read-only or full.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() == "token" and not _has_token():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        _loader().reset_cache()


def _has_token() -> bool:
    return bool(_loader().has_token(ignore_auth_mode=True))


def _loader() -> Any:
    """Return what reads the token, once; it has no types."""
    raylet: Any = ray._raylet
    return raylet.AuthenticationTokenLoader.instance()


def require_cluster(address: str, setting: str) -> None:
    """Raise ConfigError, naming ``setting``, unless the head of a Ray cluster of this version answers at ``host:port``.

    A connection may take :data:`CONNECT_TIMEOUT_S`, an answer three times as long.
    """
    where = f"{setting}={address}"
    if "://" in address:
        raise ConfigError(
            f"{where}: use host:port of the cluster's head, such as 10.0.0.1:6379, not Ray's dashboard or remote client"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{where}: expected host:port, such as 10.0.0.1:6379, or auto")
    try:
        connect(address, CONNECT_TIMEOUT_S)
    except OSError as error:
        raise ConfigError(
            f"{where}: nothing answers there ({error}); start Ray with ./launch/ray_cluster.sh head, "
            "or leave the address out for a private one"
        ) from None
    require_same_ray(_metadata(address, where), where)


def _metadata(address: str, where: str) -> dict[str, str]:
    """Return what the cluster has written of itself. Ray may abort the process that reads it, which is another one."""
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE, address],
            timeout=3 * CONNECT_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        if "uthenticat" in str(error.stderr):
            if use_token():
                return _metadata(address, where)
            raise ConfigError(
                f"{where}: this cluster requires a token: copy ~/.ray/auth_token from the machine of its head"
            ) from None
        raise ConfigError(f"{where}: what answers there is not a Ray {ray.__version__} head") from None
    metadata = json.loads(probe.stdout.splitlines()[-1])
    return {str(key): str(value) for key, value in metadata.items()}


def require_same_ray(metadata: dict[str, str], where: str) -> None:
    """Raise ConfigError, which begins with ``where``, for a cluster of another Ray or Python by its own metadata."""
    python = ".".join(map(str, sys.version_info[:3]))
    for name, key, own_version in (("Ray", "ray_version", ray.__version__), ("Python", "python_version", python)):
        version = metadata.get(key, own_version)
        if version != own_version:
            raise ConfigError(
                f"{where}: this cluster runs {name} {version}, but here is {name} {own_version}; the same is needed "
                "on every machine (./launch/quickstart.sh installs it)"
            )
