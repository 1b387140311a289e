"""A model's weights under the names, and in the shapes, that its files have.

transformers changes some of both while it loads: experts become one tensor, modules get other names. What reads files,
as vLLM's loaders do, takes the files' names alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Named = Iterator[tuple[str, Tensor]]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Conversion:
    """Tensors by their names in memory that become ``shapes``, whole, by their names in files; ``renames``: nothing
    else happens to them, so that what holds for a part of the one holds for the other.
    """

    names: tuple[str, ...]
    shapes: Shapes
    renames: bool


class FileNames:
    """Converts the tensors of one model.

    ``lm`` is as ``from_pretrained`` made it, or made it before layers were replaced or sharded; ``shapes`` are those of
    its tensors, whole, by their names in memory.
    """

    def __init__(self, lm: PreTrainedModel, shapes: Shapes) -> None:
        self.lm, self._shapes = lm, shapes
        self._groups = _groups(lm, shapes)

    @cached_property
    def conversions(self) -> list[Conversion]:
        """What :meth:`convert` does with all tensors, in the order in which it yields them."""
        place = {name: number for number, name in enumerate(self._shapes)}
        return [
            self._conversion(group)
            for group in sorted(self._groups, key=lambda names: max(place[name] for name in names))
        ]

    def _conversion(self, group: list[str]) -> Conversion:
        state = {name: torch.empty(self._shapes[name], device="meta") for name in group}
        converted = revert_weight_conversion(self.lm, state)
        shapes = {name: tuple(tensor.shape) for name, tensor in converted.items()}
        same = [id(tensor) for tensor in converted.values()] == [id(tensor) for tensor in state.values()]
        return Conversion(tuple(group), shapes, renames=same and len(group) == 1)

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
