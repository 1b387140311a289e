"""Bytes of all tensors alive on a CPU, and their peak: what a GPU's allocator would be asked for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class TensorBytes(TorchDispatchMode):
    """Counts every storage that an operation makes, from its birth until nothing refers to it, autograd included.

    What existed before counts if it is passed to :meth:`count`. Work inside one operator is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(x for x in tree_iter(result) if isinstance(x, torch.Tensor))
        return result

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._sizes:
                weakref.finalize(storage, self._gone, key)
            self.now += size - self._sizes.get(key, 0)
            self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
