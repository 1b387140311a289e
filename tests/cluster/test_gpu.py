"""What CUDA_VISIBLE_DEVICES entries mean, with and without GPUs."""

import platform
import sys
import types

import pytest

from gkd.cli.doctor import _findings
from gkd.cli.doctor.devices import NO_GPUS, Gpus, check_gpus, read_gpus
from gkd.cli.monitor import main as monitor
from gkd.cluster import gpu
from gkd.cluster.gpu import index_of, node_indices, usable_devices, uuid_of, visible_devices
from gkd.cluster.session import connect
from gkd.config.compose import compose
from gkd.errors import ConfigError, RunFailed

UUIDS = ["GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333"]


@pytest.fixture
def three_gpus(monkeypatch):
    """An NVML that knows three GPUs."""

    class NVMLError(Exception):
        pass

    class NVMLError_NoPermission(NVMLError):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    fake = types.ModuleType("pynvml")
    fake.NVMLError_NoPermission, fake.NVMLError_NotSupported = NVMLError_NoPermission, NVMLError_NotSupported
    fake.NVMLError, fake.nvmlInit, fake.nvmlShutdown = NVMLError, lambda: None, lambda: None
    fake.nvmlDeviceGetCount = lambda: 3
    fake.nvmlDeviceGetHandleByIndex = lambda index: index
    fake.nvmlDeviceGetUUID = lambda handle: UUIDS[handle]
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv(gpu.SIMULATED, raising=False)
    return fake


@pytest.mark.parametrize(
    ("token", "uuid"),
    [("1", "GPU-aaaa2222"), ("3", None), ("GPU-b", "GPU-bbbb3333"), ("GPU-a", None), ("MIG-7", "MIG-7"), ("-1", None)],
)
def test_an_entry_names_a_device(token, uuid):
    assert uuid_of(token, UUIDS) == uuid


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["0", "1", "2"]), ("", []), ("2,0", ["2", "0"]), ("1,-1,2", ["1"]), ("GPU-bbbb3333", ["GPU-bbbb3333"])],
)
def test_a_process_may_use_what_cuda_would_let_it(visible, expected):
    assert usable_devices(visible, UUIDS) == expected
    assert usable_devices(visible, []) == []


def test_indices_are_those_of_cuda_visible_devices():
    assert node_indices(None, 2, []) == [0, 1]
    assert node_indices("4,5,6", 2, []) == [4, 5]
    assert node_indices("GPU-bbbb3333,GPU-aaaa1111", 2, UUIDS) == [2, 0]


def test_slices_of_gpus_have_the_places_that_their_raylet_lists_them_in():
    assert node_indices("MIG-7,MIG-5,MIG-6", 2, UUIDS) == [0, 1]
    assert index_of("MIG-5", UUIDS, ["MIG-7", "MIG-5"]) == 1
    assert index_of("MIG-6", UUIDS, ["MIG-7", "MIG-5"]) == -1


def test_a_gpu_that_this_process_may_not_use_is_none_of_its_own(three_gpus):
    """NVML counts those of other jobs on the machine as well, where a job of Slurm's is kept to its own."""

    def get_handle(index):
        if index == 0:
            raise three_gpus.NVMLError_NoPermission
        return index

    three_gpus.nvmlDeviceGetHandleByIndex = get_handle
    assert gpu.nvml_uuids() == UUIDS[1:]
    assert visible_devices("0", "0123456789abcdef").uuids == ["GPU-aaaa2222"]


def test_a_gpu_that_the_driver_has_lost_is_named_by_the_machine(three_gpus, capsys):
    def get_handle(index):
        raise three_gpus.NVMLError("GPU is lost")

    three_gpus.nvmlDeviceGetHandleByIndex = get_handle
    three_gpus.nvmlSystemGetDriverVersion, three_gpus.nvmlSystemGetCudaDriverVersion = lambda: "580.1", lambda: 13000
    with pytest.raises(RunFailed, match=rf"{platform.node()}: GPU is lost"):
        gpu.nvml_uuids()
    finding = next(finding for finding in _findings(None) if finding.subject == "gpus")
    assert finding.level == "failed" and platform.node() in finding.observation
    assert monitor(["--once"]) == 0
    assert platform.node() in capsys.readouterr().out


def test_a_real_device_has_its_own_uuid(three_gpus):
    seen = visible_devices("2", "0123456789abcdef")
    assert (seen.uuids, seen.indices) == (["GPU-bbbb3333"], [2])


def test_an_entry_without_a_device_counts_for_nothing(three_gpus):
    assert visible_devices("7", "0123456789abcdef").uuids == []


def test_simulated_gpus_are_told_apart_by_node_and_index(three_gpus, monkeypatch):
    monkeypatch.setenv(gpu.SIMULATED, "1")
    assert visible_devices("2", "0123456789abcdef").uuids == ["SIM-01234567-2"]
    assert visible_devices("2", "fedcba9876543210").uuids == ["SIM-fedcba98-2"]


def test_without_a_driver_there_are_no_gpus(three_gpus, monkeypatch):
    def fail():
        raise three_gpus.NVMLError

    monkeypatch.setattr(three_gpus, "nvmlInit", fail)
    assert gpu.nvml_uuids() == []
    assert visible_devices("1", "0123456789abcdef").uuids == ["SIM-01234567-1"]


@pytest.mark.parametrize("file", ["nvidia0", "nvidia3"])
def test_gpus_that_the_library_does_not_open_are_not_taken_for_none(file, three_gpus, monkeypatch, tmp_path):
    """As after an update of the driver, or in a container without the right to its tools."""

    def fail():
        raise three_gpus.NVMLError("Driver/library version mismatch")

    monkeypatch.setattr(three_gpus, "nvmlInit", fail)
    monkeypatch.setattr(gpu, "DEVICES", tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert gpu.nvml_uuids() == []
    (tmp_path / file).touch()
    with pytest.raises(RunFailed, match="version mismatch"):
        gpu.nvml_uuids()
    with pytest.raises(RunFailed, match="version mismatch"):
        gpu.read_gpus()
    assert next(finding for finding in _findings(None) if finding.subject == "gpus").level == "failed"


def test_gpus_without_the_package_that_reaches_them_are_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpu, "DEVICES", tmp_path)
    assert gpu.nvml_uuids() == []
    (tmp_path / "nvidia3").touch()
    with pytest.raises(ConfigError, match="nvidia-ml-py"):
        gpu.nvml_uuids()


@pytest.mark.parametrize("simulate", [2, "auto"])
def test_a_driver_that_fails_is_no_matter_where_gpus_are_simulated(simulate, three_gpus, monkeypatch, tmp_path):
    def fail():
        raise three_gpus.NVMLError("Driver/library version mismatch")

    monkeypatch.setattr(three_gpus, "nvmlInit", fail)
    monkeypatch.setattr(gpu, "DEVICES", tmp_path)
    monkeypatch.setattr(connect, "installed_device", lambda: "cpu")
    (tmp_path / "nvidia0").touch()
    layout = ["placement=single_gpu", f"cluster.simulate_gpus={simulate}"]
    assert connect._plan_private(compose(layout))[2]
    monkeypatch.setattr(connect, "installed_device", lambda: "cuda")
    with pytest.raises(RunFailed, match="version mismatch"):
        connect._plan_private(compose(["placement=single_gpu"]))


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ("A", 12)), ("1", ("B", 24)), ("GPU-bbbb3333", ("C", 80)), ("MIG-7", ("C MIG", 10)), ("", None)],
)
def test_the_first_usable_device_is_by_cuda_visible_devices(visible, expected, three_gpus, monkeypatch):
    sizes = dict(zip([*UUIDS, "MIG-7"], [("A", 12), ("B", 24), ("C", 80), ("C MIG", 10)], strict=True))
    three_gpus.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    three_gpus.nvmlDeviceGetName = lambda handle: sizes[handle][0]
    three_gpus.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=sizes[handle][1], free=0)
    monkeypatch.delenv(gpu.VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(gpu.VISIBLE, visible)
    assert gpu.read_first_usable() == expected


def test_a_gpu_is_what_the_driver_says_of_it(three_gpus, monkeypatch):
    three_gpus.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=100 + handle, free=40)
    three_gpus.nvmlDeviceGetCudaComputeCapability = lambda handle: (9, 0)
    three_gpus.nvmlDeviceGetName = lambda handle: "NVIDIA H200"
    three_gpus.nvmlSystemGetDriverVersion, three_gpus.nvmlSystemGetCudaDriverVersion = lambda: "580.1", lambda: 13000
    assert gpu.read_gpus()[2] == gpu.Gpu(2, "GPU-bbbb3333", "NVIDIA H200", "9.0", 102, 40)
    assert gpu.read_driver() == ("580.1", 13000)
    monkeypatch.setenv(gpu.VISIBLE, "2,GPU-aaaa1,MIG-7,5,1")
    assert read_gpus() == Gpus("580.1", 13000, gpu.read_gpus(), [2, 0, "MIG-7"])
    three_gpus.nvmlInit = lambda: (_ for _ in ()).throw(three_gpus.NVMLError())
    assert (gpu.read_gpus(), gpu.read_driver(), read_gpus()) == ([], None, NO_GPUS)


def test_a_gpu_without_memory_of_its_own_has_that_of_the_machine(three_gpus, monkeypatch):
    """As a GB10 (DGX Spark), of which the driver counts none."""

    def get_memory(handle):
        raise three_gpus.NVMLError_NotSupported("Not Supported")

    monkeypatch.setattr("psutil.virtual_memory", lambda: types.SimpleNamespace(total=128, available=100))
    three_gpus.nvmlDeviceGetMemoryInfo = get_memory
    three_gpus.nvmlDeviceGetHandleByUUID = UUIDS.index
    three_gpus.nvmlDeviceGetName = lambda handle: "NVIDIA GB10"
    three_gpus.nvmlDeviceGetCudaComputeCapability = lambda handle: (12, 1)
    monkeypatch.delenv(gpu.VISIBLE, raising=False)
    assert gpu.read_memory([UUIDS[0]]) == (128, 28)
    assert gpu.read_first_usable() == ("NVIDIA GB10", 128)
    assert gpu.read_gpus()[0] == gpu.Gpu(0, UUIDS[0], "NVIDIA GB10", "12.1", 128, 100)


def test_a_container_with_a_slice_may_not_know_the_memory_of_the_whole_gpu(three_gpus, monkeypatch, capsys):
    """A run that is on the slice does not need it; one that is not sent there is informed of how it is."""

    def get_memory(handle):
        if not str(handle).startswith("MIG-"):
            raise three_gpus.NVMLError_NoPermission("Insufficient Permissions")
        return types.SimpleNamespace(total=10, free=9)

    three_gpus.nvmlDeviceGetMemoryInfo, three_gpus.nvmlDeviceGetHandleByUUID = get_memory, lambda uuid: uuid
    three_gpus.nvmlDeviceGetName = lambda handle: "NVIDIA H100"
    three_gpus.nvmlDeviceGetCudaComputeCapability = lambda handle: (9, 0)
    three_gpus.nvmlSystemGetDriverVersion, three_gpus.nvmlSystemGetCudaDriverVersion = lambda: "580.1", lambda: 13000
    monkeypatch.setenv(gpu.VISIBLE, "MIG-7")
    assert gpu.read_memory(["MIG-7"]) == (10, 1)
    assert [finding.level for finding in check_gpus(read_gpus())] == ["ok"]
    assert monitor(["--once"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "H100" in line)
    assert row.split() == ["0", "NVIDIA", "H100", "9.0"]
    with pytest.raises(RunFailed, match=rf"Insufficient Permissions .*{gpu.VISIBLE}"):
        gpu.read_memory(UUIDS[:1])
