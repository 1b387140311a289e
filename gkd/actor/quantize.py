"""4-bit weights under an adapter (QLoRA, Dettmers et al., arXiv 2305.14314), through bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from gkd.errors import ConfigError


def make_load_arguments(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return arguments of ``from_pretrained`` that read every linear layer but the head as NF4, computing in ``dtype``.

    Raises ConfigError where bitsandbytes is missing.
    """
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise ConfigError("actor.lora.quantize=nf4 needs bitsandbytes: pip install 'gkd[quantized]'") from None
    kind = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": kind, "device_map": {"": device}}


def find_quantized_layers(model: nn.Module) -> dict[str, Any]:
    """Return the 4-bit layers of a model by name; none, and nothing imported, where all are ordinary ones."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "quant_state")}


def find_packed_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return weights that are not numbers to anyone but bitsandbytes: every rank keeps them whole."""
    return {layer.weight for layer in find_quantized_layers(model).values()}


def dequantize_weights(model: nn.Module, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield ``tensors`` of ``model`` by name, 4-bit weights as what they stand for, without what describes them."""
    layers = find_quantized_layers(model)
    for name, value in tensors:
        layer, _, suffix = name.rpartition(".weight")
        if layer in layers and not suffix:
            from bitsandbytes.functional import dequantize_4bit

            weight = layers[layer].weight
            yield name, dequantize_4bit(weight.data, weight.quant_state)
        elif layer not in layers:
            yield name, value
