"""Layouts to plan, from overrides as on the command line."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gkd.config.compose import compose
from gkd.planning.layout import Layout, cpu_hardware, gpu_hardware, models_of, nodes_of
from gkd.planning.shapes import shape_of

DATA = ("data.train_files=[x]", "data.val_files=[x]", "data.answer_key=x")


QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip


@functools.cache
def layout_of(*overrides: str, on_cpu: bool = False) -> Layout:
    """Compose a layout on the GPU of the settings, or on this machine's CPU."""
    config = compose([*DATA, *overrides] if any("model." in o for o in overrides) else list(overrides))
    hardware = cpu_hardware(config.plan) if on_cpu else gpu_hardware(config.plan)
    return Layout(config, models_of(config), hardware, nodes_of(config))


def layout_with(student: Mapping[str, Any], *overrides: str) -> Layout:
    """Compose a layout with a student whose config.json is given."""
    layout = layout_of(*overrides)
    return replace(layout, models=replace(layout.models, student=shape_of(student)))
