"""Memory of the process that asks."""

from __future__ import annotations

GB = 1e9


def memory_here() -> dict[str, float]:
    """What this process holds.

    process_gb, resident on the host; allocated_gb, reserved_gb and peak_gb of torch on a GPU, how often its allocator
    had to start over (alloc_retries) or gave up (ooms). The GPU's are left out where none is used, as on a CPU and in
    the leader of a tensor-parallel engine, which computes in other processes.
    """
    import psutil
    import torch

    found = {"process_gb": psutil.Process().memory_info().rss / GB}
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return found
    counts = torch.cuda.memory_stats()
    return found | {
        "allocated_gb": torch.cuda.memory_allocated() / GB,
        "reserved_gb": torch.cuda.memory_reserved() / GB,
        "peak_gb": torch.cuda.max_memory_allocated() / GB,
        "alloc_retries": float(counts.get("num_alloc_retries", 0)),
        "ooms": float(counts.get("num_ooms", 0)),
    }
