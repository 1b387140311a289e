"""Registers this project's weight backends in every vLLM process, also the children of a tensor-parallel engine.

vLLM loads what is named under the entry point ``vllm.general_plugins`` (see pyproject.toml) as each of its processes
starts, so nothing heavy is imported here.
"""

from __future__ import annotations

BACKENDS = {
    "gkd": ("gkd.weights.vllm_backend", "BucketTransferEngine"),
    "gkd_nccl_m2n": ("gkd.weights.vllm_m2n", "M2NTransferEngine"),
}
"""Modules and classes by their names in ``weight_transfer_config``."""


def register() -> None:
    """Make the backends known to vLLM, once a process."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    for name, (module, engine) in BACKENDS.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, module, engine)
