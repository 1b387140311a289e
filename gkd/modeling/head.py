"""The head of a language model by itself: from hidden states to logits, a few positions at a time."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gkd.errors import ConfigError


class Head:
    """Turns hidden states [n, D] into logits [n, V] as the model does.

    Families scale, cap or project what the head gives, each in its own way and by settings of its own names. So the
    model's own forward is run, with the hidden states in place of everything below the head. The head's parameters stay
    those of ``lm``.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        below = get_backbone(lm)
        self._below = _GivenBackbone(below)
        # A view of the model: another table of submodules, the submodules themselves the same.
        self._view: Any = copy.copy(lm)
        self._view._modules = {name: self._below if part is below else part for name, part in lm._modules.items()}
        self._view.training = False
        self._layer = lm.get_output_embeddings()
        self._linear: bool | None = None

    @torch.no_grad()
    def linear(self, hidden: Tensor) -> nn.Linear | None:
        """Return the model's output layer where logits are what it makes of hidden states, and nothing is done to them.

        It is tried once, on a row like those of ``hidden`` [n, D]: whether the layer is a plain one, is given hidden
        states as they are, and its result leaves the model untouched.
        """
        layer = self._layer
        if type(layer) is not nn.Linear:
            return None
        if self._linear is None:
            row, captured = hidden.new_zeros(1, hidden.shape[-1]), list[Tensor]()
            handle = layer.register_forward_hook(lambda _, inputs, result: captured.extend((*inputs, result)))
            try:
                logits = self(row)
            finally:
                handle.remove()
            self._linear = len(captured) == 2 and _is_view(captured[0], row) and _is_view(logits, captured[1])
        return layer if self._linear else None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits [n, V] of hidden states [n, D]."""
        self._below.hidden = hidden[None]
        try:
            # Of the class: a wrapper put around ``lm``'s own forward would call ``lm``.
            logits: Tensor = type(self._view).forward(self._view, inputs_embeds=hidden[None], use_cache=False).logits
        finally:
            self._below.hidden = None
        return logits[0]


def get_backbone(lm: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a language model that gives its final hidden states.

    ``lm.base_model`` is the model itself, head included, in families whose ``base_model_prefix`` names the part of
    another class (Llama 4). Raises ConfigError for a model without such a part.
    """
    base = lm.base_model
    if base is not lm:
        return base
    parts = [part for part in lm.children() if isinstance(part, PreTrainedModel)]
    if len(parts) != 1:
        raise ConfigError(f"model.path: {type(lm).__name__} has no one part below its head; another model would do")
    return parts[0]


class _GivenBackbone:
    """Stands for the model below the head, or for its decoder: has its hidden states already."""

    def __init__(self, below: nn.Module) -> None:
        self._below = below
        self.hidden: Tensor | None = None

    @property
    def decoder(self) -> _GivenBackbone:
        """Of families that call the decoder of what is below the head."""
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    def __call__(self, *args: Any, **kwargs: Any) -> _Output:
        return _Output(self.hidden)


class _Output:
    """The hidden states, and None for whatever else such a model gives."""

    def __init__(self, hidden: Tensor | None) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


def _is_view(tensor: Tensor, of: Tensor) -> bool:
    """Return whether two tensors are the same numbers in the same memory, to which nothing was done in place."""
    same = tensor.data_ptr() == of.data_ptr() and tensor.numel() == of.numel() and tensor.dtype == of.dtype
    return same and of._version == 0
