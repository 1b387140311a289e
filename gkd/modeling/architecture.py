"""What a model's configuration states of its attention. Imports no torch: engines are chosen without.

Attention is plain where every layer is a softmax over all tokens before, or over a window of them. Layers that keep a
state instead, as linear attention, and soft caps on the logits of attention are not: no other function can take their
place, neither sdpa nor a kernel over sequences that are laid end to end.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

Implementation: TypeAlias = Literal["sdpa", "eager"]
_ATTENTION = {"full_attention", "sliding_attention"}
STATES = {"linear_attention", "conv", "hybrid"}
TOKENWISE = {"mlp", "moe", "dense", "sparse"}
"""Kinds of layers with a state, beside attention or in its place, and that look at one token at a time."""


def exact_attention(config: Any) -> Implementation:
    """Return transformers' attention for padded rows of a model with that configuration: sdpa leaves soft caps out."""
    return "sdpa" if has_plain_attention(config) and getattr(class_of(config), "_supports_sdpa", False) else "eager"


def has_plain_attention(config: Any) -> bool:
    """Return whether its layers are softmax attention alone, over everything or a window."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    return kinds <= _ATTENTION and not getattr(text, "attn_logit_softcapping", None)


def count_windowed_layers(config: Any) -> int:
    """Return how many layers attend to a window of the tokens before."""
    text = config.get_text_config()
    if not getattr(text, "sliding_window", None):
        return 0
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    return sum(kind == "sliding_attention" for kind in kinds)


def class_of(config: Any) -> Any:
    """Return transformers' causal language model with that configuration; None where it has none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def is_attention_alone(config: Any) -> bool:
    """Return whether a model is plain attention all through, which vLLM's backends can replace."""
    return has_plain_attention(config) and bool(getattr(class_of(config), "_supports_attention_backend", False))


def can_pack(config: Any) -> bool:
    """Return whether sequences may be laid end to end: no layer is known to look at some of the tokens before alone."""
    lm_class, kinds = class_of(config), set(getattr(config.get_text_config(), "layer_types", None) or ())
    return kinds <= _ATTENTION | STATES | TOKENWISE and lm_class is not None and lm_class._can_set_attn_implementation()


def count_mixing_layers(config: Any) -> tuple[int, int]:
    """Return how many layers look at more than one token, and how many of these are known to keep a state."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        return text.num_hidden_layers, 0
    return sum(kind not in TOKENWISE for kind in kinds), sum(kind in STATES for kind in kinds)
