"""The token that Ray's clusters ask for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gkd.cluster.session.address import TOKEN
from tests.e2e.conftest import ROOT

OF_A_HEAD = "from gkd.cluster.session.address import create_token; create_token()"
OF_A_PRIVATE_RAY = """
import os
from gkd.cluster.session.address import use_own_token
for _ in range(2):  # a second run in this process has the same, as what it starts has it from the environment
    use_own_token()
    print(os.environ.get("RAY_AUTH_TOKEN"))
"""


def run(code: str, home: Path | None) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, which reads the token once, as anybody whose umask lets others read."""
    dropped = ("HOME", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    variables = {name: value for name, value in os.environ.items() if name not in dropped}
    variables |= {"PYTHONPATH": str(ROOT), **({} if home is None else {"HOME": str(home)})}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False, umask=0o022)


def test_nobody_else_reads_the_token_of_a_users_clusters(tmp_path: Path) -> None:
    """Also not one that was made before, by Ray."""
    file = tmp_path / TOKEN
    assert run(OF_A_HEAD, tmp_path).returncode == 0
    token = file.read_text()
    assert len(token) == 64 and file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    assert run(OF_A_HEAD, tmp_path).returncode == 0
    assert file.read_text() == token and file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_home_without_a_place_for_it_is_named(tmp_path: Path) -> None:
    (tmp_path / ".ray").touch()
    assert "ConfigError: HOME=" in run(OF_A_HEAD, tmp_path).stderr


def test_a_private_ray_writes_none_into_the_home_directory(tmp_path: Path) -> None:
    first, second = run(OF_A_PRIVATE_RAY, tmp_path).stdout.split()
    assert first == second and len(first) == 64
    assert list(tmp_path.iterdir()) == []
    run(OF_A_HEAD, tmp_path)
    assert run(OF_A_PRIVATE_RAY, tmp_path).stdout.split() == ["None", "None"]
