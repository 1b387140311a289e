"""Which GPU vLLM takes a slice (MIG) to be of."""

from __future__ import annotations

import sys
import types

import pytest

from gkd.weights import vllm_plugin


@pytest.mark.parametrize(
    ("visible", "capability"), [("MIG-b2", (8, 0)), ("MIG-a1", (9, 0)), ("GPU-b", (8, 0)), (" 1,0", (8, 0))]
)
def test_a_slice_is_as_capable_as_its_gpu(
    visible: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own code with a stand-in of NVML, which counts slices by their places in their GPU."""
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", types.ModuleType("of CUDA alone"))
    from vllm import platforms
    from vllm.platforms.cuda import NvmlCudaPlatform, pynvml

    gpus, slices = ["GPU-a", "GPU-b"], {"MIG-a1": ("GPU-a", 1), "MIG-b2": ("GPU-b", 2)}
    for name, function in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetHandleByIndex": lambda index: gpus[index],
        "nvmlDeviceGetIndex": lambda handle: gpus.index(handle) if handle in gpus else slices[handle][1],
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda handle: slices[handle][0],
        "nvmlDeviceGetCudaComputeCapability": lambda handle: {"GPU-a": (9, 0), "GPU-b": (8, 0)}[handle],
    }.items():
        monkeypatch.setattr(pynvml, name, function)

    class Platform(NvmlCudaPlatform):
        pass

    monkeypatch.setattr(platforms, "_current_platform", Platform())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    vllm_plugin.register()
    assert Platform.get_device_capability() == capability
