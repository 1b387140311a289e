"""The weights of LoRA adapters (gkd.actor.lora): two of rank r beside every targeted linear layer."""

from __future__ import annotations

import re

from gkd.config import Lora
from gkd.planning.shape import ModelShape, Weight


def adapter_weights(shape: ModelShape, lora: Lora) -> list[tuple[int, Weight]]:
    """Every adapter's weights, and how many layers have the like; none without a rank."""
    if lora.r is None:
        return []
    found = []
    for layers in shape.layers:
        for w in layers.weights:
            if w.linear and _targeted(w.name, lora.target_modules):
                both = Weight(f"{w.name}.A", lora.r, w.cols), Weight(f"{w.name}.B", w.rows, lora.r)
                found += [(layers.count, one) for one in both]
    return found


def _targeted(name: str, targets: str | list[str]) -> bool:
    """Whether peft adapts it: by name, or by a regular expression over the whole path."""
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, f"model.layers.0.{name}") is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)
