"""What a worker says about itself, and which group and rank it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """What a worker process sees, reported before any model is loaded."""

    node_id: str
    """Ray's id of the node, hex."""
    ip: str
    pid: int
    cuda_visible_devices: str
    ray_gpu_ids: list[str]
    device_count: int
    gpu_uuids: list[str]
    gpu_indices: list[int]
    """The numbers that ``gpus`` ranges call the devices by."""
    gpu_bytes: int | None = None
    """Memory of the smallest device; None where they are simulated."""


@dataclass(frozen=True, kw_only=True)
class Report(DeviceReport):
    """A worker's report together with its place."""

    group: str
    rank: int
    node: str
    """The node's name for people: its address, made unique where several Ray nodes share one."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """What the worker computes on: the CPU where its GPU is only one of Ray's numbers."""
        return "cpu" if all(uuid.startswith("SIM-") for uuid in self.gpu_uuids) else "cuda"

    def __str__(self) -> str:
        return f"{self.group} rank {self.rank} (pid {self.pid} on {self.node})"

    def to_json(self) -> dict[str, Any]:
        """The record of placement.json."""
        return {
            "group": self.group,
            "rank": self.rank,
            "node": self.node,
            "pid": self.pid,
            "cuda_visible_devices": self.cuda_visible_devices,
            "ray_gpu_ids": self.ray_gpu_ids,
            "gpu_uuids": self.gpu_uuids,
        }
