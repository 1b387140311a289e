"""Layers that keep a state from token to token, within a model whose sequences are laid end to end.

Linear attention and convolutions, as in Qwen3.5, would carry it on from one sequence to the next. They are given
rows of whole sequences, while what looks at one token at a time, and attention, is computed without padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from gkd.modeling.attention import IN_ROWS
from gkd.modeling.rows import current_bounds, rows_of


def find_state_layers(lm: nn.Module) -> list[nn.Module]:
    """Return the modules that mix tokens by a state, those that begin with a convolution over the latest few.

    Others there may be as well (MiniMax's), and some convolutions are of audio.
    """
    return [module for module in lm.modules() if any(isinstance(child, nn.Conv1d) for child in module.children())]


@contextmanager
def list_state_layers_that_run(lm: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield those that run meanwhile."""
    layers = list[nn.Module]()
    handles = [layer.register_forward_hook(lambda layer, *_: layers.append(layer)) for layer in find_state_layers(lm)]
    try:
        yield layers
    finally:
        for handle in handles:
            handle.remove()


def give_rows_to_state_layers(lm: PreTrainedModel) -> None:
    """Have the layers of ``lm`` that keep a state take rows as long as its attention is :data:`IN_ROWS`."""
    hooks = _RowHooks(lm.config)
    for layer in find_state_layers(lm):
        layer.register_forward_pre_hook(hooks.add_padding, with_kwargs=True)
        layer.register_forward_hook(hooks.remove_padding)


@dataclass
class _RowHooks:
    """Hooks of the layers of a model with ``config``, which holds what takes rows at present."""

    config: PretrainedConfig

    def add_padding(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace all arguments by rows [S, M, D] of the hidden states [1, T, D], the first of them.

        Padding is on the right, where it needs no mask, and there is no cache.
        """
        if not self._takes_rows:
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        rows = rows_of(current_bounds.get(n_tokens := hidden.shape[1]), n_tokens)
        return (rows.add(hidden)[:, 0],), {}

    def remove_padding(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the output for the hidden states [1, T, D]; a layer may return more beside it."""
        if not self._takes_rows:
            return None
        rows, *others = output if isinstance(output, tuple) else (output,)
        hidden: Tensor = rows_of(current_bounds.get(), current_bounds.n_tokens).remove(rows[:, None]).transpose(0, 1)
        return (hidden, *others) if isinstance(output, tuple) else hidden

    @property
    def _takes_rows(self) -> bool:
        return bool(self.config._attn_implementation == IN_ROWS)
