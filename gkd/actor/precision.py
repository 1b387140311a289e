"""The type that each tensor of a model is computed with: transformers keeps some in float32 beside bfloat16.

Routers that choose among experts are (ERNIE 4.5, Hunyuan), and biases of others; what bfloat16 leaves of them chooses
other experts. The engines' models keep them as well (vLLM's ERNIE), or round what they are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

Dtypes = Mapping[str, torch.dtype]


def get_dtypes(empty: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the types that ``from_pretrained`` gives the tensors of a model of ``dtype``, by their names.

    ``empty`` is such a model without its weights.
    """
    plan = empty._get_dtype_plan(dtype)
    pattern = build_glob_alternation(list(plan))[0] if plan else None
    tensors = (*empty.named_parameters(), *empty.named_buffers())
    return {name: torch.float32 if pattern is not None and pattern.search(name) else t.dtype for name, t in tensors}


def find_exact(empty: PreTrainedModel, dtypes: Dtypes, dtype: torch.dtype) -> frozenset[str]:
    """Return the names of parameters that stay in float32 where the others are computed with as ``dtype``."""
    if dtype == torch.float32:
        return frozenset()
    return frozenset(name for name, _ in empty.named_parameters() if dtypes[name] == torch.float32)


def round_buffers(lm: nn.Module, dtypes: Dtypes) -> None:
    """Give the buffers of ``lm`` their types: tables of positions (XGLM) or masks in float32 would meet others.

    But for biases, by which experts are chosen: engines have all of them in float32, transformers some (not MiniMax's).
    """
    for holder, module in lm.named_modules():
        for name, value in module._buffers.items():
            dtype = dtypes.get(f"{holder}.{name}" if holder else name)
            if value is not None and dtype not in (None, value.dtype) and not name.endswith("_bias"):
                module._buffers[name] = value.to(dtype)


def find_exact_modules(layers: Iterable[nn.Module], exact: set[nn.Parameter]) -> list[nn.Module]:
    """Return the modules in ``layers`` whose parameters are all ``exact``, but for those inside of another."""
    modules: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in (part for layer in layers for part in layer.modules() if exact):
        parameters = list(module.parameters())
        if module not in inside and parameters and exact.issuperset(parameters):
            modules.append(module)
            inside.update(module.modules())
    return modules
