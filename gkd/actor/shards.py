"""A rank's part of the weights, by the names of the model's files: what transfers take that need not gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from gkd.actor.model import Student, cast_shard, gather_tensor, named_tensors
from gkd.errors import RunFailed
from gkd.weights.file_names import Conversion
from gkd.weights.shards import FilePart


class StudentShards:
    """The shards of the student that ``begin`` returns, which has no adapter, as ``dtype``; buffers and exact
    parameters as they are.

    A tensor is handed out as the rank's shard where files have it as memory has, and every rank has as much of it;
    any other is gathered, converted and whole on every rank. ``begin`` is called whenever weights are about to be read.
    """

    def __init__(self, begin: Callable[[], Student], dtype: torch.dtype) -> None:
        self._begin, self._dtype = begin, dtype

    def layout(self) -> list[FilePart]:
        """Return what every tensor is, without gathering any. Raises RunFailed for what cannot be stated in advance."""
        student, parts = self._begin(), []
        values = dict(named_tensors(student.lm))
        for conversion in student.files.conversions:
            value = values[conversion.names[0]]
            dtypes = {student.choose_sent_type(name, values[name], self._dtype) for name in conversion.names}
            if len(dtypes) > 1:
                raise RunFailed(f"{conversion.names[0]} is converted together with tensors of other types")
            (dtype,) = dtypes
            dim = find_equal_dim(value) if conversion.renames else None
            parts += [FilePart(name, dtype, shape, dim) for name, shape in conversion.shapes.items()]
        return parts

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's shard of each tensor, or all of it. A collective."""
        student = self._begin()
        values = dict(named_tensors(student.lm))
        for conversion in student.files.conversions:
            name = conversion.names[0]
            first = values[name].detach()
            if conversion.renames and isinstance(first, DTensor) and find_equal_dim(first) is not None:
                dtype = student.choose_sent_type(name, values[name], self._dtype)
                yield next(iter(conversion.shapes)), cast_shard(first, dtype)
            else:
                yield from self._gather(student, values, conversion)

    def gather(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor gathered, in the order of ``names``, as far as what is converted together is together
        there. A collective.
        """
        student, place = self._begin(), {name: number for number, name in enumerate(names)}
        values = dict(named_tensors(student.lm))
        for conversion in sorted(student.files.conversions, key=lambda one: min(place[name] for name in one.shapes)):
            yield from sorted(self._gather(student, values, conversion), key=lambda named: place[named[0]])

    def _gather(
        self, student: Student, values: dict[str, Tensor], conversion: Conversion
    ) -> Iterator[tuple[str, Tensor]]:
        gathered = (
            (name, gather_tensor(values[name].detach(), student.choose_sent_type(name, values[name], self._dtype)))
            for name in conversion.names
        )
        return student.files.convert(gathered)


def find_equal_dim(tensor: Tensor) -> int | None:
    """Return the dimension along which ranks have equal parts of a tensor; None where they have not, or all of it."""
    if not isinstance(tensor, DTensor):
        return None
    (placement,), n = tensor.placements, tensor.device_mesh.size()
    if n == 1 or not isinstance(placement, Shard) or tensor.shape[placement.dim] % n:
        return None
    return placement.dim
