"""What a process may use of its machine."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from gkd.cluster import host
from gkd.config import Plan
from gkd.planning.layout import cpu_hardware

GB = 10**9


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "GROUPS", tmp_path)
    monkeypatch.setattr(host, "OWN", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1000, "SC_PHYS_PAGES": 64 * GB // 1000}.__getitem__)
    return tmp_path


def limit(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_without_limits_it_is_the_machine(groups: Path) -> None:
    assert (host.memory(), host.cores()) == (64 * GB, 16)
    limit(groups, memory__max="max", cpu__max="max 100000")
    assert (host.memory(), host.cores()) == (64 * GB, 16)
    limit(groups, memory__max="0")  # which is none
    assert host.memory() == 64 * GB


def test_a_container_sees_its_limits_at_the_top(groups: Path) -> None:
    limit(groups, memory__max=str(8 * GB), cpu__max="250000 100000")
    assert (host.memory(), host.cores()) == (8 * GB, 3)
    hardware = cpu_hardware(Plan())
    assert (hardware.memory, hardware.name) == (8 * GB, "CPU, 3 cores")


def test_the_tightest_of_the_groups_above_counts(groups: Path) -> None:
    (groups / "own").write_text("0::/slurm/job_7/step_0\n")
    limit(groups / "slurm" / "job_7", memory__max=str(4 * GB), cpu__max="max 100000")
    limit(groups / "slurm" / "job_7" / "step_0", memory__max="max", cpu__max="50000 100000")
    assert (host.memory(), host.cores()) == (4 * GB, 1)


def test_the_first_version_of_control_groups(groups: Path) -> None:
    limit(groups / "memory", memory__limit_in_bytes=str(1 << 62))
    limit(groups / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert (host.memory(), host.cores()) == (64 * GB, 16)
    limit(groups / "memory", memory__limit_in_bytes=str(2 * GB))
    limit(groups / "cpu", cpu__cfs_quota_us="400000")
    assert (host.memory(), host.cores()) == (2 * GB, 4)


def test_a_jobs_own_groups_of_the_first_version(groups: Path) -> None:
    """Each kind of limit has a tree of its own there, as on Slurm's clusters of that time."""
    (groups / "own").write_text("9:cpu,cpuacct:/slurm/job_7\n4:memory:/slurm/job_7/step_0\n1:name=systemd:/a:b\n0::/\n")
    limit(groups / "cpu" / "slurm" / "job_7", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    limit(groups / "memory" / "slurm" / "job_7", memory__limit_in_bytes=str(3 * GB))
    limit(groups / "memory" / "slurm" / "job_7" / "step_0", memory__limit_in_bytes=str(1 << 62))
    limit(groups / "memory" / "slurm" / "job_8", memory__limit_in_bytes=str(GB))
    assert (host.memory(), host.cores()) == (3 * GB, 2)


def test_limits_that_are_smaller_than_the_object_store_are_found(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dict.fromkeys((resource.RLIMIT_FSIZE, resource.RLIMIT_AS), resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], resource.RLIM_INFINITY))
    monkeypatch.setattr(host, "SHM", groups)
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: SimpleNamespace(total=30 * GB))
    assert not list(host.find_small_limits())
    limits[resource.RLIMIT_FSIZE] = limits[resource.RLIMIT_AS] = 20 * GB
    ((state, mend),) = host.find_small_limits()  # the store takes 19.2 GB, and a process libraries beside it
    assert "19,073 MiB (ulimit -v)" in state and "22,407" in state and mend.startswith("ulimit -v unlimited")
    limits[resource.RLIMIT_FSIZE] = 19 * GB
    assert [state.split("ulimit ")[1][:2] for state, _ in host.find_small_limits()] == ["-f", "-v"]
    monkeypatch.setenv("RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION", "0.1")
    assert host.object_store_bytes() == 6.4 * GB and not list(host.find_small_limits())
    monkeypatch.delenv("RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION")
    monkeypatch.setattr(host, "SHM", groups / "none")  # Ray takes no more than 10 GB of a disk by itself
    assert host.object_store_bytes() == 19.2 * GB and not list(host.find_small_limits())
