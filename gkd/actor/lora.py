"""LoRA (Hu et al., arXiv 2106.09685) through peft: a few low-rank weights are trained, the model itself is not."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear, LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from gkd.config import Lora, suggest
from gkd.errors import ConfigError, one_line
from gkd.modeling.head import get_backbone

ADAPTER = "default"
_BASE, _LORA = ".base_layer", ".lora_"
ALL = "all-linear"

Whole = Callable[[Tensor], Tensor]


def require_adaptable(path: str, settings: Lora) -> None:
    """Raise ConfigError for adapters that the model in ``path`` cannot have; no weight is read."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, local_files_only=True))
    if settings.quantize is not None and any(isinstance(module, Conv1D) for module in lm.modules()):
        raise ConfigError(
            f"actor.lora.quantize={settings.quantize}: {path} is of type {lm.config.model_type}, whose linear layers "
            "(transformers' Conv1D) lie transposed and cannot be packed; leave it out"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the actor warns of the same
        add_adapter(lm, settings)


def add_adapter(lm: nn.Module, settings: Lora) -> None:
    """Put an adapter beside every targeted layer, in place, and freeze everything else.

    Raises ConfigError when a target matches nothing, a layer that is no linear one, or one that shares its weight with
    another, as a tied head, whose adapter would change that one too.
    """
    targets = _linear_layers(lm) if settings.target_modules == ALL else settings.target_modules
    if not isinstance(settings.target_modules, str):
        _require_layers(settings.target_modules, [name for name, _ in lm.named_modules()])
    if not targets:
        raise ConfigError(
            f"actor.lora.target_modules={ALL}: {type(lm).__name__} has no linear layer of torch's own, as adapters are "
            "merged into; leave actor.lora.r out"
        )
    try:
        inject_adapter_in_model(_lora_config(settings, targets), lm)
    except ValueError as error:
        target_modules, reason = settings.target_modules, one_line(error)
        raise ConfigError(f"actor.lora.target_modules={target_modules}: {reason}") from None
    owners = _count_owners(lm)
    for name, module in lm.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        if not _is_linear(module):
            raise ConfigError(f"actor.lora.target_modules: {name} is no linear layer; its adapter cannot be merged")
        if owners[module.base_layer.weight] > 1:
            raise ConfigError(
                f"actor.lora.target_modules: {name} shares its weight with another layer; its adapter cannot be merged"
            )
    for name, parameter in lm.named_parameters():
        if is_adapter(name):  # trained, so in float32, whatever it is beside
            parameter.data = parameter.data.float()


def _count_owners(lm: nn.Module) -> Counter[Any]:
    """Return how many layers have each parameter."""
    return Counter(p for module in lm.modules() for p in module._parameters.values() if p is not None)


def _require_layers(targets: Sequence[str], layers: Sequence[str]) -> None:
    """Raise ConfigError, naming it, for a target that no layer's name is or ends with: peft lets it pass beside one."""
    for target in targets:
        if not any(f".{layer}".endswith(f".{target}") for layer in layers):
            last = {layer.rpartition(".")[2] for layer in layers}
            raise ConfigError(
                f"actor.lora.target_modules={targets}: the model has no layer {target}{suggest(target, sorted(last))}"
            )


def _is_linear(module: nn.Module) -> bool:
    """Return whether it is a linear layer with an adapter, whose weight is a matrix or 4-bit."""
    adapted = isinstance(module, LoraLayer) and _is_plain(module.base_layer)
    return adapted and (isinstance(module, Linear) or hasattr(module.base_layer, "quant_state"))


def _is_plain(layer: nn.Module) -> bool:
    """Return whether a layer is a product with its weight: routers of some families (Llama 4) do more."""
    return type(layer) in (nn.Linear, Conv1D) or hasattr(layer, "quant_state")


def _linear_layers(lm: Any) -> list[str]:
    """Return names of all linear layers of the model of text but the head, which peft adapts by these names.

    Its all-linear takes experts along, which cannot be merged, and layers for images, which no text goes through. Names
    that it takes for experts' are left out: in some families (DeepSeek V3) those of dense layers and shared experts.
    So are layers that share their weights (Zamba 2), and those of Mamba's mixers but the first: kernels, and some of
    transformers' code, multiply by their weights alone, without an adapter.
    """
    # Not the model's own get_decoder(), which takes a head of that name for it (ModernBERT's).
    head, text = lm.get_output_embeddings(), {*get_backbone(lm).get_decoder().modules()}
    modules, owners = dict(lm.named_modules()), _count_owners(lm)

    def is_taken(name: str, module: nn.Module) -> bool:
        above, _, last = name.rpartition(".")
        own_weight = _is_plain(module) and owners[module.weight] == 1
        within_mamba = hasattr(modules[above], "A_log") and hasattr(modules[above], "D")
        return own_weight and module in text and module is not head and (last == "in_proj" or not within_mamba)

    names = [name for name, module in modules.items() if name and is_taken(name, module)]
    converted = LoraConfig(target_modules=names)
    convert_peft_config_for_transformers(converted, lm, None)
    return [name for name in names if name in (converted.target_modules or ())]


def _lora_config(settings: Lora, targets: str | list[str]) -> LoraConfig:
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.r,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.dropout,
        target_modules=targets,
    )


def merge(lm: nn.Module, tensors: Iterator[tuple[str, Tensor]], whole: Whole) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's tensors by their Hugging Face names, adapters added to what they adapt and left out.

    ``tensors`` are those of ``lm`` as it is, gathered; ``whole`` gathers one more. A collective, as those are.
    """
    adapted = {name: module for name, module in lm.named_modules() if _is_linear(module)}
    for name, value in tensors:
        if _LORA in name:
            continue
        layer, _, kind = name.rpartition(f"{_BASE}.")
        if layer in adapted and kind == "weight":
            yield f"{layer}.weight", value + _delta(adapted[layer], whole).to(value.device)
        else:
            yield name_without_adapter(name), value


def _delta(layer: Any, whole: Whole) -> Tensor:
    down, up = (whole(part[ADAPTER].weight.detach()) for part in (layer.lora_A, layer.lora_B))
    product = (up @ down) * layer.scaling[ADAPTER]
    delta: Tensor = product.T if layer.fan_in_fan_out else product
    return delta


@contextmanager
def disable_adapter(lm: nn.Module) -> Iterator[None]:
    """Have the model be as it was before it had an adapter: what the penalty of ``algorithm.kl`` refers to."""
    layers: list[Any] = [module for module in lm.modules() if _is_linear(module)]
    scalings = [layer.scaling[ADAPTER] for layer in layers]
    try:
        for layer in layers:
            layer.scaling[ADAPTER] = 0.0
        yield
    finally:
        for layer, scaling in zip(layers, scalings, strict=True):
            layer.scaling[ADAPTER] = scaling


def save_adapter(tensors: dict[str, Tensor], settings: Lora, base: str, directory: Path) -> None:
    """Write the adapter alone in peft's format, for the model in ``base``; ``tensors`` are those of the adapter.

    A model of this machine's cache of the hub is named as on the hub, with its revision.
    """
    adapted = sorted({name.partition(_LORA)[0] for name in tensors})
    described = _lora_config(settings, adapted if settings.target_modules == ALL else settings.target_modules)
    cached = re.fullmatch(rf"{re.escape(HF_HUB_CACHE)}/models--([^/]+)/snapshots/([0-9a-f]+)", base)
    described.base_model_name_or_path = cached[1].replace("--", "/") if cached else base
    described.revision = cached and cached[2]
    described.inference_mode = True
    directory.mkdir(parents=True, exist_ok=True)
    described.save_pretrained(directory)
    named = {name_in_peft(name): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, directory / "adapter_model.safetensors")


def name_in_peft(name: str) -> str:
    """Return the name of an adapter's tensor in peft's files."""
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


def name_without_adapter(name: str) -> str:
    """Return the name that a tensor of a model with an adapter had before; an adapter's own becomes none of these."""
    return name.replace(f"{_BASE}.", ".")


def is_adapter(name: str) -> bool:
    """Return whether a tensor of the model belongs to its adapter."""
    return _LORA in name
