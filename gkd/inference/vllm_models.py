"""What vLLM's kernels for a CPU are built for, read from a model's configuration before anything is started.

On a GPU there is always some kernel, so nothing is refused there.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

from gkd.errors import ConfigError
from gkd.inference.vllm_environment import installed_device

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
NEED_TORCHVISION = ("qwen3_5_text", "qwen3_5_moe_text")
"""Types of models that share a module of vLLM's with models that see; the build for a CPU comes without torchvision."""
_HEAD_SIZES = ("head_dim", "global_head_dim", "attention_head_dim")

STUDENT_REMEDY = "rollout.engine=hf samples with transformers instead"
SCORER_REMEDY = "choose another model, or score on a machine with a GPU"
REFERENCE_REMEDY = "algorithm.kl.coef=0 needs no reference, and an adapter (actor.lora.r) none of its own"


def require_vllm_runs(path: str, setting: str, remedy: str) -> None:
    """Raise ConfigError, naming ``setting`` and what to do instead, where the installed vLLM cannot run a model.

    Warns of one that vLLM computes otherwise than transformers. ``path`` is the directory of a causal language model.
    """
    if installed_device() != "cpu":
        return
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
    reason = why_not_on_a_cpu(config)
    if reason is not None:
        raise ConfigError(f"{setting}={path}: {reason}; {remedy}")
    if (apart := DIFFERING.get(config.model_type)) is not None:
        log.warning(
            "%s=%s: vLLM's log-probabilities of %s models differ from transformers' on a CPU, by up to %g nats where "
            "it was measured; %s", setting, path, config.model_type, apart, remedy,
        )  # fmt: skip


def why_not_on_a_cpu(config: Any) -> str | None:
    """What of the language model with that configuration vLLM's kernels for a CPU lack; None where nothing."""
    kind = config.model_type
    if kind in FAILING:
        return f"vLLM cannot run a {kind} model: it {FAILING[kind]}"
    if kind in NEED_TORCHVISION and find_spec("torchvision") is None:
        return f"vLLM runs a {kind} model only beside torchvision, which is not installed"
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
    """Of a model's attention layers; none for a model without any."""
    if set(getattr(config, "layer_types", None) or ()) == {"linear_attention"}:
        return []
    named = [size for name in _HEAD_SIZES if (size := getattr(config, name, None))]
    if named or not (heads := getattr(config, "num_attention_heads", None)):
        return named
    return [config.hidden_size // heads]


def _join(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
