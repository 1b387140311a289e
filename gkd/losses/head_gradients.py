"""Runs a head on a chunk of positions and takes gradients of its logits back through it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Differentiate = Callable[[Tensor, Tensor], None]
"""Called with logits [n, V] and a tensor like them, which it fills with the gradient; both may be the same memory."""


class LinearPass:
    """A plain linear head: three matrix products a chunk, and nothing of [n, V] beside the logits themselves.

    ``slopes``: gradients of its trained parameters, summed over the chunks that went through it.
    """

    def __init__(self, head: nn.Linear) -> None:
        self._head, self._weight, self._bias = head, head.weight, head.bias
        trained = [value for value in (head.weight, head.bias) if value is not None and value.requires_grad]
        self.slopes = {value: torch.zeros_like(value) for value in trained}

    def __call__(self, rows: Tensor, differentiate: Differentiate) -> Tensor:
        """Run the head forward and backward on ``rows`` [n, D]; returns their gradient [n, D]."""
        logits: Tensor = self._head(rows)
        differentiate(logits, logits)
        if self._weight in self.slopes:
            self.slopes[self._weight].addmm_(logits.T, rows)
        if self._bias is not None and self._bias in self.slopes:
            self.slopes[self._bias].add_(logits.sum(0))
        return logits @ self._weight


class AutogradPass:
    """Any other head, one that scales or caps its logits for instance, by autograd within the chunk."""

    def __init__(self, head: Callable[[Tensor], Tensor]) -> None:
        self._head = head
        self.slopes: dict[Tensor, Tensor] = {}

    def __call__(self, rows: Tensor, differentiate: Differentiate) -> Tensor:
        """Do what :class:`LinearPass` does."""
        with torch.enable_grad():
            source = rows.detach().requires_grad_()
            logits = self._head(source)
        slope = torch.empty_like(logits, requires_grad=False)
        differentiate(logits.detach(), slope)
        parameters = _leaves(logits, source)
        row_gradient, *slopes = torch.autograd.grad(logits, [source, *parameters], slope)
        for parameter, gradient in zip(parameters, slopes, strict=True):
            # Not in place: autograd may have given several parameters the same memory.
            self.slopes[parameter] = self.slopes[parameter] + gradient if parameter in self.slopes else gradient
        return row_gradient


def head_pass(head: Callable[[Tensor], Tensor]) -> LinearPass | AutogradPass:
    """Return the pass through ``head`` that fits it; only ``nn.Linear`` itself, not what extends it, is linear."""
    return LinearPass(head) if type(head) is nn.Linear else AutogradPass(head)


def _leaves(result: Tensor, but: Tensor) -> list[Tensor]:
    """Return the leaves that ``result`` has a gradient with respect to, without ``but``."""
    leaves: list[Tensor] = []
    visited, waiting = set(), [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf is not but:
            leaves.append(leaf)
        waiting.extend(before for before, _ in node.next_functions)
    return leaves
