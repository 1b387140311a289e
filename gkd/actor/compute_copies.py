"""Copies of a model's weights in the type that is computed with, for a rank that holds all of it.

FSDP2 makes such copies as well, a layer at a time, by hooks that gather and reduce among the ranks. Of one rank alone
they move every weight through memory three times more, and are most of what the host does for a small layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class ComputeCopies:
    """Puts copies of the parameters of ``model`` in ``dtype`` in their places for as long as it computes.

    Those that are not of floats, are of that type already, or are ``left_out``, stay.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, left_out: Set[nn.Parameter] = frozenset()) -> None:
        self._dtype = dtype
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None and p.is_floating_point() and p.dtype != dtype and p not in left_out:
                    self._places.setdefault(p, []).append((module, name))

    @property
    def n_numbers(self) -> int:
        """Numbers of all copies together."""
        return sum(weight.numel() for weight in self._places)

    @contextmanager
    def install(self) -> Iterator[None]:
        """Have the model compute with copies of its present weights; their gradients are added to the weights' own.

        A copy's gradient is added, in the weight's type, as soon as it is whole, and is gone then.
        """
        weights = list(self._places)
        with torch.no_grad():
            values = [torch.empty_like(weight, dtype=self._dtype) for weight in weights]
            torch._foreach_copy_(values, [weight.detach() for weight in weights])
        for weight, value in zip(weights, values, strict=True):
            copy = nn.Parameter(value, weight.requires_grad)
            if weight.requires_grad:
                copy.register_post_accumulate_grad_hook(_add_to(weight))  # type: ignore[no-untyped-call]
            self._put(weight, copy)
        try:
            yield
        finally:
            for weight in weights:
                self._put(weight, weight)

    def _put(self, weight: nn.Parameter, value: nn.Parameter) -> None:
        for module, name in self._places[weight]:
            module._parameters[name] = value


def _add_to(weight: nn.Parameter) -> Callable[[Tensor], None]:
    def add(copy: Tensor) -> None:
        slope, copy.grad = copy.grad, None
        assert slope is not None, "it is called once there is one"
        if weight.grad is None:
            weight.grad = slope.to(weight.dtype)
        else:
            weight.grad.add_(slope)

    return add
