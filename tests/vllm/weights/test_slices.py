"""Which GPU vLLM takes an entry of CUDA_VISIBLE_DEVICES for, and a slice (MIG) to be of."""

from __future__ import annotations

import sys
import types

import pytest

from gkd.weights import vllm_plugin


@pytest.mark.parametrize(
    ("visible", "capability"),
    [
        ("MIG-b2", (8, 0)),
        ("MIG-a1", (9, 0)),
        ("GPU-b1b1", (8, 0)),
        ("GPU-b", (8, 0)),
        ("GPU-a", (9, 0)),
        (" 1,0", (8, 0)),
    ],
)
def test_an_entry_is_as_capable_as_its_gpu(
    visible: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own code with a stand-in of NVML, which counts slices by their places in their GPU, takes whole UUIDs
    alone, and counts a GPU of another job's.
    """
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", types.ModuleType("of CUDA alone"))
    from vllm import platforms
    from vllm.platforms.cuda import NvmlCudaPlatform, pynvml

    gpus, slices = ["GPU-a1a1", "GPU-b1b1", "GPU-a2a2"], {"MIG-a1": ("GPU-a1a1", 1), "MIG-b2": ("GPU-b1b1", 2)}

    def get_handle(index: int) -> str:
        if index == 2:
            raise pynvml.NVMLError_NoPermission
        return gpus[index]

    for name, function in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetUUID": lambda handle: handle,
        "nvmlDeviceGetHandleByUUID": {name: name for name in (*gpus, *slices)}.__getitem__,
        "nvmlDeviceGetHandleByIndex": get_handle,
        "nvmlDeviceGetIndex": lambda handle: gpus.index(handle) if handle in gpus else slices[handle][1],
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda handle: slices[handle][0],
        "nvmlDeviceGetCudaComputeCapability": lambda handle: {"GPU-a1a1": (9, 0), "GPU-b1b1": (8, 0)}[handle],
    }.items():
        monkeypatch.setattr(pynvml, name, function)

    class Platform(NvmlCudaPlatform):
        pass

    monkeypatch.setattr(platforms, "_current_platform", Platform())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    vllm_plugin.register()
    assert Platform.get_device_capability() == capability
