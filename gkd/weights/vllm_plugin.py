"""Tells every vLLM process, also the children of a tensor-parallel engine, of this project's weight backend.

vLLM loads what is named under the entry point ``vllm.general_plugins`` (see pyproject.toml) as each of its processes
starts, so nothing heavy is imported here.
"""

from __future__ import annotations

BACKEND = "gkd"


def register() -> str:
    """Make the backend known to vLLM, once a process; returns its name for ``weight_transfer_config``."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "gkd.weights.vllm_backend", "PieceTransferEngine")
    return BACKEND
