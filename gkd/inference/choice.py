"""Which engine ``teacher.engine=auto`` and ``reference.engine=auto`` are, by the model that is to score."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gkd.inference.vllm_models import why_not_here
from gkd.modeling.architecture import can_pack

if TYPE_CHECKING:
    from gkd.config import Scorer

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def scoring_engine(settings: Scorer, path: str) -> str:
    """Return ``settings.engine`` with ``auto`` decided for the model in ``path``.

    An engine over several GPUs, or with weights that it quantizes, is vLLM's. On one, torch scores a model that is
    dense attention all through, which it can pack, and vLLM, where that runs the model, those for which transformers
    has no fast layers: experts, states, soft caps, and weights that are stored quantized.
    """
    if settings.engine != "auto":
        return settings.engine
    if settings.tensor_parallel_size > 1 or settings.quantization is not None:
        return "vllm"
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, local_files_only=True)
    return "torch" if _is_dense(config) or why_not_here(config) is not None else "vllm"


def _is_dense(config: Any) -> bool:
    text = config.get_text_config()
    return (
        can_pack(config)
        and not any(getattr(text, name, None) for name in _EXPERTS)
        and not getattr(config, "quantization_config", None)
    )
