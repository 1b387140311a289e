"""Tells every vLLM process, also the children of a tensor-parallel engine, of this project's weight backends.

vLLM loads what is named under the entry point ``vllm.general_plugins`` (see pyproject.toml) as each of its processes
starts, so nothing heavy is imported here.
"""

from __future__ import annotations

BACKENDS = {
    "object_store": ("gkd_tensors", "TensorTransferEngine"),
    "ipc": ("gkd_ipc", "IpcEngine"),
    "nccl": ("gkd_nccl", "NcclEngine"),
}
"""Name in vLLM and class in :mod:`gkd.weights.vllm_backend`, by the value of weights.transfer."""


def register(transfer: str = "object_store") -> str:
    """Make the backends known to vLLM, once a process; returns the name for ``weight_transfer_config``."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    for backend, engine in BACKENDS.values():
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, "gkd.weights.vllm_backend", engine)
    return BACKENDS[transfer][0]
