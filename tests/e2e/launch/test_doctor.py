"""What the doctor finds by running programs."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray import cloudpickle

from gkd.cli.doctor import devices, node, system
from gkd.cluster import host
from tests.cli.test_doctor import H200
from tests.e2e.conftest import ROOT
from tests.error_text import contains_in_order


def test_a_compiler_is_looked_for_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert [*devices.check_compiler(devices.NO_GPUS)] == []
    monkeypatch.delenv("CC", raising=False)
    (finding,) = devices.check_compiler(H200)
    assert (finding.level, finding.subject) == ("ok", "compiler")
    monkeypatch.setattr(devices.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    (finding,) = devices.check_compiler(H200)
    assert finding.level == "failed"
    assert f"{tmp_path}/Python.h" in finding.observation
    assert "python3-dev" in finding.do
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    (finding,) = devices.check_compiler(H200)
    assert os.strerror(errno.ENOENT) in finding.observation
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = devices.check_compiler(H200)
    assert contains_in_order(finding.observation, "CC", "gcc", "clang")


@pytest.mark.parametrize(
    ("script", "level", "pattern"),
    [
        ("read asked; [ $asked = get_server_list ]", "ok", "runs in /pipes: .* at the same time"),
        ("echo Cannot find MPS control daemon process; exit 1", "ok", "does not run: .* in turn"),
        ("exec /bin/sleep 60", "warning", "does not answer: .*timed out after 0.5 seconds"),
    ],
)
def test_whether_mps_runs_is_asked_of_its_control(
    script: str, level: str, pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "MPS_TIMEOUT_S", 0.5 if level == "warning" else 60.0)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/pipes")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [*devices.check_mps(H200)] == []
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(f"#!/bin/sh\n{script}\n")
    control.chmod(0o755)
    (finding,) = devices.check_mps(H200)
    assert (finding.level, finding.subject) == (level, "mps")
    assert re.search(pattern, finding.observation)
    assert [*devices.check_mps(devices.NO_GPUS)] == []


def test_the_quickstart_asks_for_a_compiler_before_it_installs(tmp_path: Path) -> None:
    """Of a checkout without .venv, with a python3 and no compiler in the path."""
    (tmp_path / "launch").mkdir()
    for name in ("launch/environment.sh", "launch/quickstart.sh", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname", "cat", "sha256sum", "cut", "rm"):
        (tools / tool).symlink_to(shutil.which(tool) or tool)
    (tools / "python3").symlink_to(sys._base_executable)
    venv = {"PATH": str(tools), "GKD_DEVICE": "cuda", "PIP_NO_INDEX": "1"}
    done = subprocess.run(
        ["bash", "launch/quickstart.sh"],
        cwd=tmp_path,
        env=venv,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "installing" not in done.stdout
    assert done.stderr.startswith("error: GPUs need"), done.stderr
    assert "apt-get install gcc python3-dev" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_disks_shared_memory_and_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places = {"outputs": tmp_path / "not" / "there"}
    assert [f.level for f in system.check_disks(places)] != ["failed"]
    monkeypatch.setattr(system, "TOO_LITTLE_DISK", 1 << 60)
    assert [f.level for f in system.check_disks(places)] == ["failed"]
    monkeypatch.setattr(host, "memory", lambda: 1 << 60)
    assert [f.level for f in system.check_shared_memory(1)] == ["warning"]
    monkeypatch.setattr(system, "NCCL_SHM", 1 << 60)
    assert [f.level for f in system.check_shared_memory(2)] == ["failed"]
    check = "from gkd.cli.doctor.system import check_limits; print(next(check_limits()))"
    done = subprocess.run(
        ["bash", "-c", f'ulimit -n 900; exec "{sys.executable}" -c "{check}"'],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("failed   limits         ulimit -n is 900")


AS_ON_A_NODE = """
import importlib.util, json, pickle, sys
sys.modules["gkd"] = None  # any import of it fails
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "gkd" else real(name, *rest)
print(json.dumps(pickle.loads(sys.stdin.buffer.read())(("ray",))))
"""


def test_a_node_need_not_have_this_project() -> None:
    """What is looked at there travels with what it uses."""
    modules = (node, *node.SENT)
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        sent = cloudpickle.dumps(node.collect_facts)
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    done = subprocess.run(
        [sys.executable, "-c", AS_ON_A_NODE], input=sent, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    facts = json.loads(done.stdout)
    assert facts["versions"]["gkd"] == "missing"
    assert facts["versions"]["ray"] == ray.__version__


@pytest.mark.parametrize(
    ("smi", "file", "device"),
    [
        ("for i in $(seq 8); do echo GPU $i; sleep 0.01; done", None, "cuda"),
        ("echo No devices were found; exit 6", None, "cpu"),
        ("echo Failed to initialize NVML: Driver/library version mismatch; exit 18", "nvidia0", "cuda"),
        (None, "nvidia3", "cuda"),
        (None, "nvidiactl", "cpu"),
        (None, None, "cpu"),
    ],
)
def test_what_is_installed_is_for_the_gpus_that_there_are(
    smi: str | None, file: str | None, device: str, tmp_path: Path
) -> None:
    """Whether they are printed at once, line by line, or only given to a container as files."""
    (devices := tmp_path / "dev").mkdir()
    if file is not None:
        (devices / file).touch()
    tools = {name: shutil.which(name) or name for name in ("bash", "seq", "sleep", "dirname")}
    for name, path in tools.items():
        (tmp_path / name).symlink_to(path)
    if smi is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!{tools['bash']}\n{smi}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    command = f"set -euo pipefail; source {ROOT}/launch/environment.sh; find_device {devices}"
    done = subprocess.run(
        ["bash", "-c", command], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == device
