"""A model's weights under the names, and in the shapes, that its files have.

transformers changes some of both while it loads: experts become one tensor, modules get other names. What reads files,
as vLLM's loaders do, knows the files' names alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Named = Iterator[tuple[str, Tensor]]
Shapes = dict[str, tuple[int, ...]]


class FileNames:
    """Converts the tensors of one model.

    ``lm`` is as ``from_pretrained`` made it, or made it before layers were replaced or sharded; ``shapes`` are those of
    its tensors, whole, by their names in memory.
    """

    def __init__(self, lm: PreTrainedModel, shapes: Shapes) -> None:
        self.lm = lm
        self._groups = _groups(lm, shapes)

    def convert(self, tensors: Named) -> Named:
        """Convert ``tensors``, those of the model by their names in memory, to what the files have.

        Holds as many tensors at a time as belong to one conversion: mostly one.
        """
        lacking = {name: group for group in self._groups for name in group}
        held: dict[str, Tensor] = {}
        for name, tensor in tensors:
            held[name] = tensor
            group = lacking[name]
            if held.keys() >= set(group):
                yield from revert_weight_conversion(self.lm, {n: held.pop(n) for n in group}).items()
        assert not held, f"tensors of a conversion are missing beside {next(iter(held))}"


def _groups(lm: PreTrainedModel, shapes: Shapes) -> list[list[str]]:
    """Return names of tensors that are converted together, as few at a time as give what all of them at once give."""
    by_layer: dict[str, list[str]] = {}
    for name in shapes:
        by_layer.setdefault(_layer(name), []).append(name)
    whole = _convert_shapes(lm, shapes, [list(shapes)])
    for groups in ([[name] for name in shapes], list(by_layer.values())):
        if _convert_shapes(lm, shapes, groups) == whole:
            return groups
    return [list(shapes)]


def _layer(name: str) -> str:
    """Return the part of ``model.layers.3.mlp.weight`` up to the number."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: number + 1])


def _convert_shapes(lm: PreTrainedModel, shapes: Shapes, groups: list[list[str]]) -> Shapes | None:
    """Convert names and shapes group by group; None where a group lacks what its conversion needs."""
    shapes_in_files: Shapes = {}
    try:
        for group in groups:
            state = {name: torch.empty(shapes[name], device="meta") for name in group}
            shapes_in_files |= {name: tuple(t.shape) for name, t in revert_weight_conversion(lm, state).items()}
    except (ValueError, RuntimeError, KeyError):
        return None
    return shapes_in_files
