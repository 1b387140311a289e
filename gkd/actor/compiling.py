"""The student's decoder layers as fewer kernels: compiled (gkd.modeling.compiling), or Liger's.

All shapes of a compiled layer are those of a pack, and packs are padded to a few sizes (:meth:`Compilation.pad`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import PreTrainedModel

from gkd.config.actor import pack_size
from gkd.errors import ConfigError
from gkd.losses.outcomes import Kernels
from gkd.modeling.backbone import takes_rows
from gkd.modeling.compiling import CompileSetting, allow_compiling, compile_layers
from gkd.modeling.sequences import PackedSequences


@dataclass
class Compilation:
    """Compilation of the layers of a student: for packs of ``budget`` tokens, or ``dynamic``ally for padded rows.

    ``strict``: see :class:`CompileSetting`.
    """

    budget: int
    dynamic: bool
    strict: bool
    kernels: Kernels = field(default_factory=Kernels.compile, compare=False)
    """Of the loss."""

    def pad(self, packed: PackedSequences) -> PackedSequences:
        """Return a pack of one of the sizes; what it has more than ``packed`` has no row in the loss."""
        return packed if self.dynamic else packed.pad(pack_size(len(packed), self.budget))

    def allow_compiling(self) -> AbstractContextManager[None]:
        """Have torch compile layers that run here for the first time."""
        return allow_compiling(self.strict)


def compile_setting(value: bool | Literal["auto"]) -> CompileSetting:
    """Return the setting ``actor.compile``, as messages name it."""
    return CompileSetting("actor", value, f"actor.compile={str(value).lower()}", "actor.compile=false computes without")


def compile_student(
    lm: PreTrainedModel, value: bool | Literal["auto"], budget: int, device: torch.device
) -> Compilation | None:
    """Have the decoder layers of ``lm`` compile when they first run, for packs of ``budget`` tokens; None: they do not.

    Before they are sharded: FSDP's hooks stay outside. ``value`` is ``actor.compile``. Raises ConfigError where it is
    true and torch cannot compile here.
    """
    setting = compile_setting(value)
    if not compile_layers(lm, setting, device, dynamic=False):
        return None
    return Compilation(budget, takes_rows(lm), setting.strict)


def use_liger(lm: PreTrainedModel, device: torch.device) -> None:
    """Give ``lm`` Liger's fused kernels (Hsu et al., arXiv 2410.10989), before it is sharded.

    They are in place of transformers' norms, rotary embeddings, which are this process' for its family, and SwiGLU.
    Head and loss stay this project's, which are one pass already (gkd.losses.chunked).

    Raises ConfigError where ``device`` is no GPU, the package is missing, or Liger has nothing for the family.
    """
    if device.type != "cuda":
        raise ConfigError("actor.liger=true: Liger's kernels are for GPUs, and the actor computes on a CPU")
    try:
        from liger_kernel.transformers.monkey_patch import (
            MODEL_TYPE_TO_APPLY_LIGER_FN,
            _apply_liger_kernel_to_instance,
        )
    except ImportError as error:
        raise ConfigError(f"actor.liger=true needs liger-kernel: pip install 'gkd[liger]' ({error})") from None
    family = lm.config.model_type
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"actor.liger=true: Liger has no kernels for models of type {family}")
    _apply_liger_kernel_to_instance(model=lm, cross_entropy=False, fused_linear_cross_entropy=False)
