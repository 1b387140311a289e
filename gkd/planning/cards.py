"""What a card has: memory, speed, and links, from the makers' data sheets."""

from __future__ import annotations

import os
from dataclasses import dataclass

from gkd.cluster.gpu import nvml_uuids
from gkd.config import Plan, nearest
from gkd.errors import ConfigError

GIB = 1 << 30
DEFAULT = "h100-80gb"
GPU_EFFICIENCY, CPU_EFFICIENCY = 0.24, 0.3


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, or a machine's CPU that all workers share.

    ``memory`` bytes that CUDA reports; ``flops`` a second that matrix products reach; ``bandwidth`` of the memory,
    ``link`` within and ``network`` between nodes, bytes a second.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float
    network: float
    is_cpu: bool = False


# Memory as CUDA reports it (GiB), dense bfloat16 TFLOP/s, memory GB/s, GPU-to-GPU GB/s one way (NVLink, or PCIe).
CARDS: dict[str, tuple[float, float, float, float]] = {
    "b200": (178.0, 2250, 8000, 900),
    "h200": (139.8, 989, 4800, 450),
    "h100-80gb": (79.1, 989, 3350, 450),
    "h100-pcie": (79.1, 756, 2000, 64),
    "a100-80gb": (79.1, 312, 2039, 300),
    "a100-40gb": (39.4, 312, 1555, 300),
    "l40s": (44.4, 362, 864, 32),
    "l4": (22.0, 121, 300, 16),
    "a10": (22.0, 125, 600, 32),
    "rtx-5090": (31.4, 209, 1792, 64),
    "rtx-4090": (23.5, 165, 1008, 32),
    "rtx-3090": (23.6, 71, 936, 16),
    "rtx-3060": (11.6, 25, 360, 16),
}


def gpu(plan: Plan) -> Card:
    """The card of the settings, of this machine, or the default.

    Where only ``plan.memory_gb`` says which, it is taken to be as fast as the known card nearest to that. Raises
    ConfigError for a name that is not known.
    """
    name, memory, shown = plan.card, plan.memory_gb, plan.card
    if name is None:
        here = _here()
        name, found = here or (DEFAULT, None)
        if here is None and memory is not None:
            wanted = memory * 1e9
            name = min(CARDS, key=lambda card: abs(CARDS[card][0] * GIB - wanted))
            shown = f"a GPU, taken to be as fast as {name} (plan.card),"
        memory = memory or found
    if name not in CARDS:
        known = ", ".join(CARDS)
        raise ConfigError(
            f"plan.card={name} is not known{nearest(name, list(CARDS))}; there are {known}, or give plan.memory_gb, "
            "plan.tflops, plan.memory_bandwidth_gb_s and plan.link_gb_s beside one of them"
        )
    gib, tflops, bandwidth, link = CARDS[name]
    return Card(
        name=shown or name,
        memory=memory * 1e9 if memory else gib * GIB,
        flops=(plan.tflops or tflops) * 1e12 * (plan.efficiency or GPU_EFFICIENCY),
        bandwidth=(plan.memory_bandwidth_gb_s or bandwidth) * 1e9,
        link=(plan.link_gb_s or link) * 1e9,
        network=plan.network_gb_s * 1e9,
    )


def cpu(plan: Plan) -> Card:
    """This machine without a GPU: 0.1 TFLOP/s a core in float32, as measured on an AMD EPYC."""
    cores = len(os.sched_getaffinity(0))
    memory = plan.memory_gb * 1e9 if plan.memory_gb else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    flops = (plan.tflops or 0.1 * cores) * 1e12 * (plan.efficiency or CPU_EFFICIENCY)
    bandwidth, link = (plan.memory_bandwidth_gb_s or 20) * 1e9, (plan.link_gb_s or 5) * 1e9
    return Card(f"CPU, {cores} cores", memory, flops, bandwidth, link, plan.network_gb_s * 1e9, is_cpu=True)


def found() -> bool:
    """Whether this machine has a GPU."""
    return bool(nvml_uuids())


def _here() -> tuple[str, float] | None:
    """This machine's first GPU: the known card its name contains, and its memory in GB; None without one."""
    if not found():
        return None
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        raw, memory = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetMemoryInfo(handle).total
    finally:
        pynvml.nvmlShutdown()
    card = card_named(raw.decode() if isinstance(raw, bytes) else raw, memory / GIB)
    return None if card is None else (card, memory / 1e9)


def card_named(name: str, gib: float) -> str | None:
    """The known card of a driver's name such as ``NVIDIA A100-SXM4-40GB``, by memory where several share it."""
    words = set(name.lower().replace("-", " ").split())
    fitting = [card for card in CARDS if {part for part in card.split("-") if "gb" not in part} <= words]
    return min(fitting, key=lambda card: abs(CARDS[card][0] - gib), default=None)
