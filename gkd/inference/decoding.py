"""Decoding with a transformers model, without what ``generate`` works out anew for every call and every token.

Shapes: B rows, P tokens of a prompt with its padding, T tokens of a response, V the vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from gkd.modeling.architecture import is_attention_alone
from gkd.types import Int32

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_TAKEN = {"attention_mask", "position_ids", "use_cache", "logits_to_keep"}
_CACHES = ("cache", "past_key_values")
"""Names of the argument for keys and values, of which a model has one: the second in transformers 5.19, the first in
5.24."""


def is_decoded_plainly(model: PreTrainedModel) -> bool:
    """Return whether :func:`decode` is all there is to decoding with ``model``.

    Others have states beside keys and values, positions of their own, or prepare their inputs in a way of their own.
    """
    from transformers import GenerationMixin

    prepares_inputs = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    stateful = getattr(model, "_is_stateful", False)
    takes_all = inspect.signature(model.forward).parameters.keys() >= _TAKEN and _find_cache_argument(model) is not None
    return is_attention_alone(model.config) and not prepares_inputs and not stateful and takes_all


def _find_cache_argument(model: PreTrainedModel) -> str | None:
    """Return the name by which ``model`` takes its keys and values, None where it takes none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in _CACHES if name in parameters), None)


def pad(rows: Sequence[Int32], padding: int, side: Literal["left", "right"]) -> tuple[Tensor, Tensor]:
    """Return the token ids ``rows`` as one tensor [B, P], and a mask of its shape that is 0 where it is padded."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    masks = [torch.ones_like(row) for row in ids]
    return pad_sequence(ids, True, padding, side), pad_sequence(masks, True, 0, side)


def decode(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor,
    max_tokens: int,
    choose: Callable[[Tensor, Tensor], Tensor],
    end_ids: Sequence[int],
    stops: Callable[[Tensor, None], Tensor] | None = None,
) -> Tensor:
    """Return the tokens [B, T] that follow the prompts ``ids`` [B, P]; T is as long as it takes, or ``max_tokens``.

    ``mask`` [B, P] is 0 where a prompt is padded, on its left. ``choose(ids [B, P + t], scores [B, V])`` gives the next
    tokens, [B, 1]. A row ends with one of ``end_ids``, or where ``stops(ids [B, P + t], None)`` [B] is true, and is
    filled up with the first of these.
    """
    import torch
    from transformers import DynamicCache

    n_prompt, fill = ids.shape[1], end_ids[0] if end_ids else 0
    name = _find_cache_argument(model)
    assert name is not None, "it is decoded plainly"
    cache = {name: DynamicCache(config=model.config.get_text_config(decoder=True))}
    ends = torch.tensor(end_ids, dtype=ids.dtype, device=ids.device)
    tokens, inputs, positions = ids, ids, (mask.cumsum(-1) - 1).clamp_(min=0)
    unfinished = torch.ones_like(ids[:, :1], dtype=torch.bool)
    while True:
        out = model(
            input_ids=inputs,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **cache,
        )
        inputs = choose(tokens, out.logits[:, -1]).where(unfinished, fill)
        tokens = torch.cat([tokens, inputs], 1)
        unfinished &= ~torch.isin(inputs, ends)
        if stops is not None:
            unfinished &= ~stops(tokens, None)[:, None]
        if tokens.shape[1] == n_prompt + max_tokens or not unfinished.any():
            return tokens[:, n_prompt:]
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
