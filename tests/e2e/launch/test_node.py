"""launch/ray_cluster.sh without a Ray: what it refuses, and what it makes of what it finds written down."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gkd.cli.launch.node import _parser, _ray_options, main
from gkd.cluster import gpu
from gkd.cluster.session import local
from gkd.cluster.session.local import LocalNode
from gkd.cluster.session.port import free_port
from tests.error_text import contains_in_order
from tests.messages import NODE, entries, names_what_is_wrong, overrides


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(local.DIRECTORY, tempfile.mkdtemp(prefix="gkd-t-", dir="/tmp"))
    return local.make_directory()


@pytest.fixture(autouse=True)
def _clean(directory: Path) -> object:
    yield
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()


@pytest.mark.parametrize("command", [command for command in entries() if command.startswith(NODE)])
def test_a_number_that_cannot_be_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of tests/messages.txt; tests/messages.py says how to renew it."""
    assert main(overrides(command.removeprefix(NODE))) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("error: ")
    assert names_what_is_wrong(error, command)
    assert error.removeprefix("error: ").strip() == entries()[command]


def test_a_damaged_record_is_passed_over(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    (directory / "node-x.json").write_text("")
    (directory / "node-y.json").write_text('{"kind": "head"}')
    assert local.nodes() == []
    assert local.find_running_address() is None
    assert "node-x.json" in caplog.text


def test_what_a_dead_head_left_is_ended_and_a_run_that_joined_is_not(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both hide their environment and hold a log open, as Ray's agents do; one is of the node's session."""
    monkeypatch.setattr(local, "GRACE_S", 0.2)
    logs = directory / "ray-feedbeef"
    logs.mkdir()
    agent, run = _writer(logs / "agent.log"), _writer(logs / "run.log")
    try:
        node = LocalNode("head", "127.0.0.1:6379", None, agent.pid, "feedbeef")
        node.write()
        assert not node.is_alive
        assert node.processes() == [agent.pid]
        assert main(["stop"]) == 0
        assert contains_in_order(capsys.readouterr().out, "head", "127.0.0.1:6379")
        assert agent.wait(timeout=60) < 0
        assert run.poll() is None
        assert main(["stop"]) == 0
        assert "Ray node" in capsys.readouterr().out
    finally:
        for process in (agent, run):
            process.kill()
            process.wait()
        shutil.rmtree(logs)


@pytest.mark.parametrize(("address", "code"), [("localhost:6379", 0), ("127.0.0.1:6380", 2)])
def test_a_machine_does_not_join_a_cluster_twice_by_two_names_of_its_head(
    address: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray would hand out its GPUs twice. At another port is another cluster, here one that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = address.replace("6380", str(port))
    node = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={local.MARK: "feedbeef"})
    try:
        LocalNode("worker", "127.0.0.1:6379", None, node.pid, "feedbeef").write()
        while not local.nodes():
            assert node.poll() is None
        assert main(["worker", "--address", address]) == code
        out, err = capsys.readouterr()
        assert (f"pid {node.pid}" in out) == (code == 0) and (address in err) == (code == 2)
    finally:
        node.kill()
        node.wait()


def test_a_host_that_the_dashboard_cannot_listen_at_is_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """As the address by which others reach a machine of a cloud, which is none of its own."""
    ports = ["--port", str(free_port()), "--dashboard-port", str(free_port())]
    assert main(["head", *ports, "--dashboard-host", "203.0.113.9"]) == 2
    reason = os.strerror(errno.EADDRNOTAVAIL)
    assert contains_in_order(capsys.readouterr().err, "--dashboard-host 203.0.113.9: ", reason)


@pytest.mark.parametrize(
    ("visible", "arguments", "expected"),
    [
        ("MIG-a,MIG-b, MIG-c", [], ["--num-gpus=3"]),
        ("MIG-a,9,MIG-c", [], ["--num-gpus=1"]),  # CUDA sees nothing from the 9 on
        ("MIG-a,MIG-b", ["--simulate-gpus", "4"], ["--num-gpus=4"]),
        ("0", [], []),
        (None, [], []),
    ],
)
def test_slices_of_gpus_are_counted_each(
    visible: str | None, arguments: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray by itself counts GPUs, of which there is one here."""
    monkeypatch.setattr(gpu, "nvml_uuids", lambda: ["GPU-1"])
    monkeypatch.delenv(gpu.VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(gpu.VISIBLE, visible)
    options = _parser().parse_args(["worker", "--address", "localhost:6379", *arguments])
    assert [option for option in _ray_options(options, "127.0.0.1") if option.startswith("--num-gpus")] == expected


def test_what_nodes_have_left_is_removed_but_not_the_log_of_one_that_is_starting(directory: Path) -> None:
    new, old, files = directory / "node-1111.log", directory / "node-2222.log", directory / "ray-2222"
    files.mkdir()
    for path in (new, old):
        path.touch()
    for path in (old, files):
        os.utime(path, (0, 0))
    local.clear()
    assert list(directory.iterdir()) == [new]


def _writer(log: Path) -> subprocess.Popen[bytes]:
    """A process in a session of its own that holds ``log`` open."""
    program = f"import time; f = open({str(log)!r}, 'w'); print('open', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env={}, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process
