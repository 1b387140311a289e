"""Reading causal language models from their directories. Nothing is looked up on a hub."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from gkd.errors import ConfigError


def read_model(
    path: str, what: str, dtype: torch.dtype, attention: Callable[[PretrainedConfig], str], **further: Any
) -> PreTrainedModel:
    """Return the model in ``path``, its weights as ``dtype``, with the attention that is right for its configuration.

    ``further`` are arguments of ``from_pretrained``. Raises ConfigError, which begins with ``what``, for weights that
    are not all there: transformers would fill them with random numbers.
    """
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    lm: PreTrainedModel
    lm, report = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        attn_implementation=attention(config),
        local_files_only=True,
        output_loading_info=True,
        **further,
    )
    if lacking := sorted(report["missing_keys"]):
        raise ConfigError(f"{what}: its weights lack {lacking[0]} ({len(lacking)} tensors in all)")
    return lm
