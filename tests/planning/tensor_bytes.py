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

    What existed before counts if it is passed to :meth:`count`. Work inside one operator is not seen. ``resizing``:
    sizes are asked for anew with every operation, as FSDP2 gives memory back by making a storage empty.
    """

    def __init__(self, resizing: bool = False) -> None:
        super().__init__()
        self.peak, self.resizing = 0, resizing
        self._sum = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(x for x in tree_iter(result) if isinstance(x, torch.Tensor))
        return result

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            if storage._cdata not in self._alive:
                self._add(storage)
        self.peak = max(self.peak, self.now)

    @property
    def now(self) -> int:
        """Bytes at this moment."""
        if not self.resizing:
            return self._sum
        return sum(storage.nbytes() for ref in list(self._alive.values()) if (storage := ref()) is not None)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, n_bytes = storage._cdata, storage.nbytes()

        def gone(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._alive[key]
            self._sum -= n_bytes

        self._alive[key] = weakref.ref(storage, gone)
        self._sum += n_bytes
