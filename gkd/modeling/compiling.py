"""The decoder layers of a model as fewer kernels, compiled with torch.compile.

Each is compiled by itself: equal layers share what is compiled. Attention between sequences stays out of it: its
kernels gain nothing, and its shapes change with every pack.
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

from gkd.errors import ConfigError, one_line
from gkd.modeling.architecture import exact_attention
from gkd.modeling.attention import leave_uncompiled
from gkd.modeling.backbone import decoder_layers, takes_rows

log = logging.getLogger("gkd")
BACKEND = "inductor"
MOST_VARIANTS = 64  # of one piece of code: sizes, with and without gradients, kinds of layers
LEAST_PARAMETERS = 50_000_000  # with fewer, what compiling takes is more than most runs would save
THREADS = 4  # processes that compile, of each rank; torch takes 32


@dataclass(frozen=True, slots=True)
class CompileSetting:
    """Whether the layers of ``owner``'s model are compiled, and the setting that decides it, as messages name it.

    ``value`` "auto" is GPUs, and models that are not small, whose sequences are packed, and whose layers are dense and
    not 4-bit. ``text`` is such as ``actor.compile=auto``; ``remedy`` what computes without.
    """

    owner: str
    value: bool | Literal["auto"]
    text: str
    remedy: str

    @property
    def strict(self) -> bool:
        """Whether a layer that cannot be compiled is an error; otherwise it is computed as it is, with a warning."""
        return self.value is True

    def failure_text(self, error: BaseException) -> str:
        """Return the line that a run ends with where torch could not compile a layer."""
        failure = f"{self.text}: torch could not compile a layer of the {self.owner}'s model"
        return f"{failure}: {one_line(error)[:300]}; {self.remedy}"


def compile_layers(
    lm: PreTrainedModel, setting: CompileSetting, device: torch.device, dynamic: bool | None = None
) -> bool:
    """Have the decoder layers of ``lm`` compile when they first run; returns False where they are left as they are.

    Where some of them take rows, all do then, and are compiled for any sizes. ``dynamic``: whether those of plain
    attention are as well, instead of once for each size; None: of what is seen to change from the second size on.
    Raises ConfigError where it is strict and torch cannot compile here.
    """
    packed = not takes_rows(lm)
    worthwhile = device.type == "cuda" and packed and _is_dense(lm) and _is_large(lm)
    if setting.value is False or not (setting.strict or worthwhile):
        return False
    layers = decoder_layers(lm)
    reason = None if layers else "transformers does not mark which of its layers are alike"
    if (reason := reason or find_obstacle(device)) is not None:
        if setting.strict:
            raise ConfigError(f"{setting.text}: {reason}; {setting.remedy}")
        log.warning("the %s's layers are not compiled (%s): %s", setting.owner, setting.text, reason)
        return False
    if packed:
        leave_uncompiled()
    else:
        lm.set_attn_implementation(exact_attention(lm.config))
    for layer in layers:
        layer.forward = compile_function(layer.forward, dynamic if packed else True)
    if not setting.strict:
        _warn_in_one_line(setting)
    return True


@contextmanager
def allow_compiling(strict: bool) -> Iterator[None]:
    """Have torch compile what it meets here for the first time. Its limits and ways are settings of the thread."""
    from torch._dynamo import config

    with config.patch(recompile_limit=MOST_VARIANTS, suppress_errors=not strict):
        yield


def find_obstacle(device: torch.device) -> str | None:
    """Return why torch cannot compile for ``device``, found by compiling a line; None where it can."""
    from torch._dynamo import config

    if config.disable:
        return "TORCHDYNAMO_DISABLE is set in the environment"

    def line(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).sin().sum()

    try:
        x = torch.ones(8, device=device, requires_grad=True)
        compile_function(line, dynamic=False)(x).backward()
    except Exception as error:
        return f"torch could not compile one line here, for which it needs a C compiler: {one_line(error)[:300]}"
    return None


def is_compile_failure(error: BaseException) -> bool:
    """Return whether torch failed to compile something, which is not the same as failing to compute it."""
    kinds = {module for kind in type(error).__mro__ if (module := kind.__module__).startswith("torch._")}
    return any(module.startswith(("torch._dynamo", "torch._inductor")) for module in kinds)


def compile_function(function: Any, dynamic: bool | None) -> Any:
    """Return ``function`` compiled; ``dynamic`` as in :func:`compile_layers`."""
    threads = min(THREADS, torch.get_num_threads())
    # Dropout, of adapters, draws what it draws without compilation.
    options: Any = {"fallback_random": True, "compile_threads": threads} if BACKEND == "inductor" else None
    return torch.compile(function, backend=BACKEND, dynamic=dynamic, options=options)


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


class _OneLine(logging.Filter):
    """Logs in one line, once, that a part of a layer is not compiled, where torch would print a traceback for each."""

    def __init__(self, setting: CompileSetting) -> None:
        super().__init__()
        self._setting, self._logged = setting, False

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or record.exc_info is None:
            return True
        if not self._logged:
            reason, setting = one_line(record.exc_info[1] or record.getMessage())[:300], self._setting
            text = "a part of the %s's layers is not compiled (%s): %s; %s"
            log.warning(text, setting.owner, setting.text, reason, setting.remedy)
            self._logged = True
        return False


def _warn_in_one_line(setting: CompileSetting) -> None:
    logger = logging.getLogger("torch._dynamo.convert_frame")
    for installed in [entry for entry in logger.filters if isinstance(entry, _OneLine)]:  # of a model before this one
        logger.removeFilter(installed)
    logger.addFilter(_OneLine(setting))
