"""Kernels of other packages, which transformers calls in layers that keep a state wherever they are installed.

They are for GPUs alone. Without them such layers are computed by reference code of transformers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.integrations import hub_kernels
from transformers.utils.import_utils import is_torchdynamo_exporting

_FALLS_BACK = re.compile(r"`(\w+)` is falling back .* because `([\w.-]+)` is not installed")


@contextmanager
def use_reference_code() -> Iterator[None]:
    """Have layers meanwhile be computed by transformers' own code, which runs on every device.

    It does so itself where a model is exported, and asks for that by the name that is replaced here.
    """
    hub_kernels.is_torchdynamo_exporting = lambda: True
    try:
        yield
    finally:
        hub_kernels.is_torchdynamo_exporting = is_torchdynamo_exporting


@contextmanager
def list_missing_packages() -> Iterator[dict[str, str]]:
    """Yield the packages that functions called meanwhile would have kernels of, by function.

    transformers warns of each one once in a process, in a log that nobody reads on a cluster.
    """
    missing = dict[str, str]()
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]

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
