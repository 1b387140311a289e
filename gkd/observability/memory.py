"""GPU memory of the process that asks."""

from __future__ import annotations

GB = 1e9


def gpu_memory() -> dict[str, float]:
    """allocated_gb, reserved_gb and peak_gb of torch in this process; empty where it uses no GPU.

    So it is on a CPU, and in the leader of a tensor-parallel engine, which computes in other processes.
    """
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    return {
        "allocated_gb": torch.cuda.memory_allocated() / GB,
        "reserved_gb": torch.cuda.memory_reserved() / GB,
        "peak_gb": torch.cuda.max_memory_allocated() / GB,
    }
