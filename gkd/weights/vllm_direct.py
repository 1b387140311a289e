"""Weights that a model of vLLM's copies into its parameters by itself, past their weight loaders.

vLLM's reload puts parameters on the meta device and collects what their loaders are given until a layer is complete.
Some models (gpt-oss its experts and sinks) copy into the parameter instead, which on the meta device does nothing, and
the old weights stay. Here such copies are kept, and the layer is processed as soon as it has all of its weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

_UNMARKED = "_gkd_unmarked"


class DirectCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context for ``model.load_weights`` between the beginning and the end of a reload.

    ``model`` is one whose reload has begun.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owners: dict[int, tuple[nn.Module, str]] = {}
        """By the storage of a parameter on the meta device: its layer and its name there."""
        self._kept: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._copied: Counter[Tensor] = Counter()
        """Numbers copied into each of them."""
        self._in_loader = False
        parameter: Any  # with what vLLM puts on it
        for layer in model.modules():
            for name, parameter in layer._parameters.items():
                if parameter is not None and parameter.is_meta:
                    self._owners[_storage(parameter)] = layer, name
                    parameter.weight_loader = self._mark(parameter.weight_loader)

    def _mark(self, loader: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``loader``, which vLLM finds by its name among those it has wrapped.

        vLLM keeps its tensors on the meta device, and so what was returned here, from one reload to the next: one
        around the other they would be as deep as there were reloads.
        """
        loader = getattr(loader, _UNMARKED, loader)

        @wraps(loader)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            before, self._in_loader = self._in_loader, True
            try:
                return loader(*args, **kwargs)
            finally:
                self._in_loader = before

        setattr(wrapper, _UNMARKED, loader)
        return wrapper

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and not self._in_loader and args[0].is_meta and not args[1].is_meta:
            self._keep(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _keep(self, target: Tensor, source: Tensor) -> None:
        """Do the copy into memory of our own. ``target`` is a parameter or a part of it, on the meta device."""
        if (owner := self._owners.get(_storage(target))) is None:
            return
        layer, name = owner
        parameters = self._kept.setdefault(layer, {})
        if name not in parameters:
            with layerwise.get_layerwise_info(layer).restore_device:
                parameters[name] = materialize_meta_tensor(layer._parameters[name])
        parameters[name].as_strided(target.size(), target.stride(), target.storage_offset()).copy_(source)
        self._copied[parameters[name]] += target.numel()

    def process(self, whole: bool) -> None:
        """Have layers take over what was kept for them once that is all they lack, or ``whole``: in any case."""
        for layer, parameters in list(self._kept.items()):
            info = layerwise.get_layerwise_info(layer)
            lacking = layerwise.get_layer_size(layer) - info.load_numel
            if whole or sum(min(self._copied[t], get_tensor_load_numel(t)) for t in parameters.values()) >= lacking:
                for name, tensor in self._kept.pop(layer).items():
                    delattr(layer, name)
                    layer.register_parameter(name, tensor)
                layerwise._layerwise_process(layer, info)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
