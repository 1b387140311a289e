"""A causal language model below its head: final hidden states of sequences laid end to end.

Shapes: S sequences, T tokens in all, M the longest, D the hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from gkd.errors import ConfigError, one_line
from gkd.modeling import attention
from gkd.modeling.architecture import can_pack, count_mixing_layers, count_windowed_layers, exact_attention
from gkd.modeling.head import Head, get_backbone
from gkd.modeling.kernels import list_missing_packages, use_reference_code
from gkd.modeling.layout import SequenceLayout
from gkd.modeling.rows import current_bounds
from gkd.modeling.sequences import PackedSequences
from gkd.modeling.states import give_rows_to_state_layers, list_state_layers_that_run

log = logging.getLogger("gkd")
ROUNDED = 0.1
"""Share of their spread that logits in bfloat16 may be off. Those of 64 to 96 random layers are 0.02 to 0.09 off
float32's.
"""


def choose_attention(config: PretrainedConfig) -> str:
    """Return the attention to load a model with: packed where it can be replaced, and looks at all tokens before.

    :func:`pack_or_pad` finds out whether packing works.
    """
    return attention.NAME if can_pack(config) else exact_attention(config)


def decoder_layers(lm: nn.Module) -> list[nn.Module]:
    """Return the layers that transformers never splits over devices, those inside of another first (Mamba's mixers)."""
    names = set(getattr(lm, "_no_split_modules", None) or ())
    return [module for module in reversed(list(lm.modules())) if type(module).__name__ in names]


def is_packed(lm: PreTrainedModel) -> bool:
    """Return whether sequences go through ``lm`` laid end to end."""
    return lm.config._attn_implementation in attention.PACKED


def takes_rows(lm: PreTrainedModel) -> bool:
    """Return whether layers of ``lm`` are given rows of whole sequences: all of them, or those that need to."""
    return bool(lm.config._attn_implementation != attention.NAME)


def hidden_states(lm: PreTrainedModel, packed: PackedSequences) -> Tensor:
    """Return final hidden states [T, D] of sequences laid end to end.

    A model that cannot pack gets them as padded rows [S, M]; none of them may then lack its beginning.
    """
    if is_packed(lm):
        with current_bounds.use(packed.bounds, len(packed)):
            return _run_below(lm, packed.token_ids[None], position_ids=packed.position_ids[None])[0]
    assert packed.key_index is None, "rows are whole sequences"
    lengths = packed.cu_seqlens.diff()
    steps = torch.arange(packed.max_seqlen, device=lengths.device)
    real = steps < lengths[:, None]  # [S, M]
    rows = torch.zeros(real.shape, dtype=torch.int64, device=lengths.device)
    rows[real] = packed.token_ids
    return _run_below(lm, rows, attention_mask=real.long())[real]


@torch.no_grad()
def pack_or_pad(lm: PreTrainedModel, source: str, device: torch.device | None = None) -> None:
    """Have ``lm``, loaded with :func:`choose_attention`, take padded rows in those layers where packing does not work.

    Layers that keep a state would carry it over from one sequence to the next, and soft caps and sinks are not what
    packed attention computes: these are given rows. Sequences are tried that begin with others: their logits are to be
    those that transformers gives for the longest alone, also where some have their beginning in common. Otherwise all
    layers are given rows: an attention of its own may add to the scores, and a window may be in the mask alone, which
    is not made for packed attention. ``device`` is what the model is for, where it is not there yet. Warns of layers
    that a GPU computes without the kernels that are made for them.

    Raises ConfigError, which begins with ``source``, where rows do no better: of models that look at later tokens or
    are padded on the left, and of those that raise whatever it is. The latter may work on their own device, if they are
    on another one, and are padded, as nothing is known of them.
    """
    computes_elsewhere = device is not None and lm.device.type != device.type
    with list_missing_packages() as missing, use_reference_code() if computes_elsewhere else nullcontext():
        _pack_or_pad(lm, source, computes_elsewhere)
    if missing and (device or lm.device).type == "cuda":
        log.warning(
            "%s: transformers computes %s by reference code, which on a GPU is many times slower than kernels of "
            "packages that are not installed: pip install %s",
            source, ", ".join(sorted(missing)), " ".join(sorted(set(missing.values()))),
        )  # fmt: skip


def _pack_or_pad(lm: PreTrainedModel, source: str, computes_elsewhere: bool) -> None:
    family = lm.config.model_type
    give_rows_to_state_layers(lm)
    try:
        trial, reason = _Trial(lm), None
        for implementation in attention.PACKED if is_packed(lm) else ():
            lm.set_attn_implementation(implementation)
            if (reason := trial.find_obstacle()) is None:
                return
        if reason is not None:
            log.info("%s is computed with padding: %s", type(lm).__name__, reason)
        lm.set_attn_implementation(exact_attention(lm.config))
        off = trial.relative_error()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a family's own code raises whatever it meets
        if computes_elsewhere:
            log.info("%s is computed with padding, as the CPU cannot try it: %s", type(lm).__name__, one_line(error))
            lm.set_attn_implementation(exact_attention(lm.config))
            return
        raise ConfigError(f"{source}: models of type {family} cannot be computed: {one_line(error)}") from error
    if off > (1e-2 if trial.is_precise else 0.5):  # another order of sums may choose other experts
        raise ConfigError(
            f"{source}: models of type {family} cannot be computed: of two sequences beside each other, logits are off "
            f"by {off:.0%} from those of one alone, as where later tokens or padding are seen"
        )


class _Trial:
    """Short sequences that begin alike, whose logits are known: with that beginning in common, and without."""

    lengths, n_shared = (3, 5, 4), (2, 0, 2)

    def __init__(self, lm: PreTrainedModel) -> None:
        self.lm = lm
        ids = (7 * np.arange(max(self.lengths)) + 1) % lm.config.get_text_config().vocab_size
        sequences = [ids[:n].astype(np.int32) for n in self.lengths]
        self.shared, self.whole = (
            PackedSequences.from_layout(SequenceLayout(sequences, n)).to(lambda tensor: tensor.to(lm.device))
            for n in (self.n_shared, [0] * len(sequences))
        )
        with use_padded_rows(lm):
            self.alone = lm(torch.from_numpy(ids)[None].to(lm.device), use_cache=False).logits[0].float()

    @property
    def is_precise(self) -> bool:
        """Whether it computes in float32; 4-bit layers do not, whatever type is around them."""
        return self.lm.dtype == torch.float32 and getattr(self.lm, "hf_quantizer", None) is None

    def relative_error(self) -> float:
        """Return how far logits, as they are computed here, are from the known ones, beside their spread."""
        packed = self.shared if is_packed(self.lm) else self.whole
        logits = self.alone[packed.position_ids]
        off = (Head(self.lm)(hidden_states(self.lm, packed)).float() - logits).norm()
        spread = (logits - logits.mean(-1, keepdim=True)).norm()
        return 0.0 if off == 0 else float(off / spread)

    def find_obstacle(self) -> str | None:
        """Return why they may not be laid end to end; None where they may."""
        config = self.lm.config
        try:
            with (
                attention.list_windows(config._attn_implementation) as windows,
                list_state_layers_that_run(self.lm) as states,
            ):
                off = self.relative_error()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # Attention that is another one, layers that take no such arguments, kernels that do not take their shapes,
            # and whatever else a family's own code meets.
            return one_line(error)
        n_states = len(states) if takes_rows(self.lm) else 0
        n_mixing, n_keeping = count_mixing_layers(config)
        if n_states < n_keeping or n_states + len(windows) < n_mixing:
            return "a layer looks at other tokens in a way of its own"
        if sum(window is not None for window in windows) < count_windowed_layers(config):
            return "its window is in its mask alone"
        if off <= (1e-3 if self.is_precise else ROUNDED):
            return None
        return f"end to end, its logits are off by {off:.2g} of their spread"


@contextmanager
def use_padded_rows(lm: PreTrainedModel) -> Iterator[None]:
    """Have ``lm`` meanwhile take padded rows as transformers does, with a cache or without."""
    before = lm.config._attn_implementation
    lm.set_attn_implementation(exact_attention(lm.config))
    try:
        yield
    finally:
        lm.set_attn_implementation(before)


def _run_below(lm: PreTrainedModel, token_ids: Tensor, **kwargs: Any) -> Tensor:
    hidden: Tensor = get_backbone(lm)(token_ids, use_cache=False, **kwargs).last_hidden_state
    return hidden
