"""GPU memory of the process that asks."""

from __future__ import annotations

GB = 1e9


def gpu_memory(simulated: bool) -> dict[str, float]:
    """allocated_gb, reserved_gb and peak_gb of torch in this process; empty where the GPU is simulated."""
    if simulated:
        return {}
    import torch

    return {
        "allocated_gb": torch.cuda.memory_allocated() / GB,
        "reserved_gb": torch.cuda.memory_reserved() / GB,
        "peak_gb": torch.cuda.max_memory_allocated() / GB,
    }
