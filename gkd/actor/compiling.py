"""The student's decoder layers as fewer kernels: compiled with torch.compile, or Liger's.

Each is compiled by itself: equal layers share what is compiled. Attention between sequences stays out of it: its
kernels gain nothing, and its shapes change with every micro-batch. All other shapes are those of a pack, and packs are
padded to a few sizes (:meth:`Compilation.pad`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from gkd.config.actor import pack_size
from gkd.errors import ConfigError, one_line
from gkd.losses.micro_batch import MicroBatch
from gkd.modeling.attention import ASIDE, aside
from gkd.modeling.backbone import decoder_layers

log = logging.getLogger("gkd")
BACKEND = "inductor"
MOST_VARIANTS = 64  # of one piece of code: sizes, with and without gradients, kinds of layers
LEAST_PARAMETERS = 50_000_000  # with fewer, what compiling takes is more than most runs would save
THREADS = 4  # processes that compile, of each rank; torch takes 32
REMEDY = "actor.compile=false computes without"
LIGERS_LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}


@dataclass
class Compilation:
    """Compilation of the layers of a student: for packs of ``budget`` tokens, or ``dynamic``ally for padded rows.

    ``strict``: a layer that cannot be compiled ends the run (``actor.compile=true``); otherwise it is computed as it
    is, with a warning.
    """

    budget: int
    dynamic: bool
    strict: bool

    def pad(self, micro: MicroBatch) -> MicroBatch:
        """Return a pack of one of the sizes; what it has more than ``micro`` has no row in the loss."""
        n_tokens = len(micro.token_ids)
        return micro if self.dynamic else micro.pad(pack_size(n_tokens, self.budget))

    @contextmanager
    def allow_compiling(self) -> Iterator[None]:
        """Have torch compile what it meets here for the first time. Its limits and ways are settings of the thread."""
        from torch._dynamo import config

        with config.patch(recompile_limit=MOST_VARIANTS, suppress_errors=not self.strict):
            yield


def compile_layers(
    lm: PreTrainedModel, setting: bool | Literal["auto"], budget: int, device: torch.device, packed: bool
) -> Compilation | None:
    """Have the decoder layers of ``lm`` compile when they first run; returns how, None where they are left as they are.

    Before they are sharded: FSDP's hooks stay outside. ``setting`` is ``actor.compile``; "auto" is GPUs, and models
    that are not small, whose sequences are ``packed``, and whose layers are dense and not 4-bit. Raises ConfigError
    where it is true and torch cannot compile here.
    """
    strict = setting is True
    if setting is False or (not strict and not (device.type == "cuda" and packed and _is_dense(lm) and _is_large(lm))):
        return None
    layers = decoder_layers(lm)
    reason = None if layers else "transformers does not mark which of its layers are alike"
    if (reason := reason or find_obstacle(device)) is not None:
        if strict:
            raise ConfigError(f"actor.compile=true: {reason}; {REMEDY}")
        log.warning("the actor's layers are not compiled (actor.compile=auto): %s", reason)
        return None
    if packed:
        aside.register()
        lm.set_attn_implementation(ASIDE)
    for layer in layers:
        layer.forward = _compile(layer.forward, dynamic=not packed)
    if not strict:
        _warn_in_one_line()
    return Compilation(budget, not packed, strict)


def find_obstacle(device: torch.device) -> str | None:
    """Return why torch cannot compile for ``device``, found by compiling a line; None where it can."""
    from torch._dynamo import config

    if config.disable:
        return "TORCHDYNAMO_DISABLE is set in the environment"

    def line(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).sin().sum()

    try:
        x = torch.ones(8, device=device, requires_grad=True)
        _compile(line, dynamic=False)(x).backward()
    except Exception as error:
        return f"torch could not compile one line here, for which it needs a C compiler: {one_line(error)[:300]}"
    return None


def is_compile_failure(error: BaseException) -> bool:
    """Return whether torch failed to compile something, which is not the same as failing to compute it."""
    kinds = {module for kind in type(error).__mro__ if (module := kind.__module__).startswith("torch._")}
    return any(module.startswith(("torch._dynamo", "torch._inductor")) for module in kinds)


def compile_failure_text(error: BaseException, setting: bool | Literal["auto"]) -> str:
    """Return the one line that a run ends with; ``setting`` is ``actor.compile``."""
    failure = f"actor.compile={str(setting).lower()}: torch could not compile a layer of the student"
    return f"{failure}: {one_line(error)[:300]}; {REMEDY}"


def _is_dense(lm: nn.Module) -> bool:
    """Return whether no layer has experts, whose shapes change with what they are given, or weights in 4 bits."""
    return not any(
        "expert" in type(module).__name__.lower()
        or "moe" in type(module).__name__.lower()
        or hasattr(module, "quant_state")
        for module in lm.modules()
    )


def _is_large(lm: nn.Module) -> bool:
    return sum(parameter.numel() for parameter in lm.parameters()) >= LEAST_PARAMETERS


def _compile(function: Any, dynamic: bool) -> Any:
    threads = min(THREADS, torch.get_num_threads())
    # Dropout, of adapters, draws what it draws without compilation.
    options: Any = {"fallback_random": True, "compile_threads": threads} if BACKEND == "inductor" else None
    return torch.compile(function, backend=BACKEND, dynamic=dynamic, options=options)


class _OneLine(logging.Filter):
    """Logs in one line, once, that a part of a layer is not compiled, where torch would print a traceback for each."""

    logged = False

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or record.exc_info is None:
            return True
        if not _OneLine.logged:
            reason = one_line(record.exc_info[1] or record.getMessage())[:300]
            log.warning("a part of the student's layers is not compiled (actor.compile=auto): %s; %s", reason, REMEDY)
            _OneLine.logged = True
        return False


def _warn_in_one_line() -> None:
    logger = logging.getLogger("torch._dynamo.convert_frame")
    if not any(isinstance(known, _OneLine) for known in logger.filters):
        logger.addFilter(_OneLine())


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
    _apply_liger_kernel_to_instance(model=lm, **LIGERS_LOSSES)
