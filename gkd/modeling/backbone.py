"""A causal language model below its head: final hidden states of sequences laid end to end.

Shapes: S sequences, L tokens in all, M the longest, D the hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from gkd.errors import one_line
from gkd.modeling import attention
from gkd.modeling.architecture import can_pack, count_windowed_layers, exact_attention
from gkd.modeling.head import get_backbone

log = logging.getLogger("gkd")


def choose_attention(config: PretrainedConfig) -> str:
    """Return the attention to load a model with: packed where it seems to be attention all through and replaceable.

    :func:`keeps_sequences_apart` returns whether packing works. Recurrent and linear-attention layers would carry state
    over from one sequence to the next, and soft-capped or sink attention is not what the packed function computes.
    """
    return attention.NAME if can_pack(config) else exact_attention(config)


def decoder_layers(lm: nn.Module) -> list[nn.Module]:
    """Return the layers that transformers never splits over devices, those inside of another first (Mamba's mixers)."""
    names = set(getattr(lm, "_no_split_modules", None) or ())
    return [module for module in reversed(list(lm.modules())) if type(module).__name__ in names]


def is_packed(lm: PreTrainedModel) -> bool:
    """Return whether sequences go through ``lm`` laid end to end, without padding."""
    return lm.config._attn_implementation in (attention.NAME, attention.ASIDE)


def hidden_states(
    lm: PreTrainedModel, token_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Return final hidden states [L, D] of ``token_ids`` [L], S sequences laid end to end.

    ``position_ids`` [L] count from each sequence's start; ``cu_seqlens`` [S + 1]: where each starts; ``max_seqlen``: M.
    A model that cannot pack gets them as padded rows [S, M].
    """
    if is_packed(lm):
        return _run_packed(lm, token_ids, position_ids, cu_seqlens, max_seqlen)
    lengths = cu_seqlens.diff()
    steps = torch.arange(max_seqlen, device=lengths.device)
    real = steps < lengths[:, None]  # [S, M]
    rows = torch.zeros(real.shape, dtype=torch.int64, device=lengths.device)
    rows[real] = token_ids
    return _run_below(lm, rows, attention_mask=real.long())[real]


@torch.no_grad()
def keeps_sequences_apart(lm: PreTrainedModel, device: torch.device) -> bool:
    """Return whether of two sequences laid end to end the second is what transformers gives for it alone.

    A layer may keep where sequences begin from its attention, carry a state on, or count positions by itself; an
    attention of its own may add to the scores; and of a window it may tell the mask alone, which is not made then.
    """
    first, second = 3, 5
    positions = torch.cat([torch.arange(n, device=device) for n in (first, second)])
    ids = (7 * torch.arange(first + second, device=device) + 1) % lm.config.get_text_config().vocab_size
    try:
        with attention.count_windows() as windows:
            both = _run_packed(lm, ids, positions, _bounds([0, first, first + second], device), second)[first:]
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        # Attention without bounds, layers that take no such arguments, and kernels that do not take their shapes.
        log.info("%s is computed with padding: %s", type(lm).__name__, one_line(error))
        return False
    if len(windows) < count_windowed_layers(lm.config):
        log.info("%s is computed with padding: its window is in its mask alone", type(lm).__name__)
        return False
    lm.set_attn_implementation(exact_attention(lm.config))
    alone = _run_below(lm, ids[None, first:])[0]
    lm.set_attn_implementation(attention.NAME)
    tolerance = 1e-3 if both.dtype == torch.float32 else 5e-2
    return bool((both - alone).abs().max() <= tolerance * alone.abs().max())


def pack_or_pad(lm: PreTrainedModel) -> None:
    """Have ``lm``, loaded with :func:`choose_attention`, take padded rows where packing does not work."""
    if is_packed(lm) and not keeps_sequences_apart(lm, lm.device):
        lm.set_attn_implementation(exact_attention(lm.config))


@contextmanager
def use_padded_rows(lm: PreTrainedModel) -> Iterator[None]:
    """Have ``lm`` meanwhile take padded rows as transformers does, with a cache or without."""
    before = lm.config._attn_implementation
    lm.set_attn_implementation(exact_attention(lm.config))
    try:
        yield
    finally:
        lm.set_attn_implementation(before)


def _run_packed(lm: PreTrainedModel, token_ids: Tensor, position_ids: Tensor, bounds: Tensor, longest: int) -> Tensor:
    if lm.config._attn_implementation == attention.ASIDE:
        attention.aside.bounds, attention.aside.longest = bounds, longest
        return _run_below(lm, token_ids[None], position_ids=position_ids[None])[0]
    return _run_below(
        lm,
        token_ids[None],
        position_ids=position_ids[None],
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=longest,
        max_length_k=longest,
    )[0]


def _run_below(lm: PreTrainedModel, token_ids: Tensor, **kwargs: Any) -> Tensor:
    hidden: Tensor = get_backbone(lm)(token_ids, use_cache=False, **kwargs).last_hidden_state
    return hidden


def _bounds(places: list[int], device: torch.device) -> Tensor:
    return torch.tensor(places, dtype=torch.int32, device=device)
