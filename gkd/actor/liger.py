"""Liger's fused kernels (Hsu et al., arXiv 2410.10989) in place of transformers' norms, rotary embeddings and SwiGLU.

Head and loss stay this project's, which are one pass already (gkd.losses.chunked).
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from gkd.errors import ConfigError

LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def use_liger(lm: PreTrainedModel, device: torch.device) -> None:
    """Give ``lm`` Liger's kernels, before it is sharded; rotary embeddings are this process' for its family.

    Raises ConfigError where ``device`` is no GPU, the package is missing, or Liger has nothing for the family.
    """
    if device.type != "cuda":
        raise ConfigError("actor.liger=true: Liger's kernels are for GPUs, and the actor computes on a CPU")
    try:
        from liger_kernel.transformers.monkey_patch import (
            MODEL_TYPE_TO_APPLY_LIGER_FN,
            _apply_liger_kernel_to_instance,
        )
    except ImportError as error:
        raise ConfigError(f"actor.liger=true needs liger-kernel: pip install 'gkd[liger]' ({error})") from None
    family = lm.config.model_type
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"actor.liger=true: Liger has no kernels for models of type {family}")
    _apply_liger_kernel_to_instance(model=lm, **LOSSES)
