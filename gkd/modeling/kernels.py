"""Kernels of other packages, which transformers calls in layers that keep a state wherever they are installed.

They are for GPUs alone. Without them such layers are computed by reference code of transformers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.integrations import hub_kernels

_FALLS_BACK = re.compile(r"`(\w+)` is falling back .* because `([\w.-]+)` is not installed")


@contextmanager
def use_reference_code(device: torch.device) -> Iterator[None]:
    """Have layers on a CPU meanwhile be computed by transformers' own code, also where kernels are installed.

    transformers does so where a model is exported, and asks for that by the name that is replaced here.
    """
    before = hub_kernels.is_torchdynamo_exporting
    if device.type == "cpu":
        hub_kernels.is_torchdynamo_exporting = lambda: True
    try:
        yield
    finally:
        hub_kernels.is_torchdynamo_exporting = before


@contextmanager
def list_missing_packages() -> Iterator[dict[str, str]]:
    """Yield the packages that functions called meanwhile would have kernels of, by function.

    transformers warns of each one once in a process, in a log that nobody reads on a cluster.
    """
    missing = dict[str, str]()

    def note(record: logging.LogRecord) -> bool:
        match = _FALLS_BACK.search(record.getMessage())
        if match is not None:
            missing[match[1]] = match[2]
        return match is None

    logger = logging.getLogger(hub_kernels.__name__)
    logger.addFilter(note)
    try:
        yield missing
    finally:
        logger.removeFilter(note)
