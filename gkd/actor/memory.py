"""When memory runs out: what that looks like, and smaller micro-batches to try again with."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from gkd.actor.batches import SampleLength, count_tokens, pack
from gkd.config import Config
from gkd.planning.advice.changes import LEVEL_NAMES, actor_overrides

_SIGNS = re.compile(
    "DefaultCPUAllocator|CUBLAS_STATUS_ALLOC_FAILED|CUDA (driver )?error: out of memory|Triton Error.*: out of memory"
    # NCCL's, which torch hands on as it is: "ncclUnhandledCudaError: ... Cuda failure 2 'out of memory'"
    "|Cuda failure (\\d+ )?'out of memory'|Failed to CUDA (host |)?(m|c)?alloc"
)
"""Of errors without a class of their own: torch's on a CPU, and those of libraries that allocate for themselves."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch could not allocate, on a GPU or on a CPU, where it has no error of its own for that."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _SIGNS.search(str(error)) is not None


def shrink_budget(budget: int, lengths: Sequence[SampleLength], padded: bool = False) -> int | None:
    """Return tokens a micro-batch may have after those of ``budget`` were too much for samples of these ``lengths``.

    Half of what the largest had; None where that was one sample alone. A rank without any has the others' passes, of
    which it knows no more than their budget.
    """
    parts = pack(lengths, budget, padded)
    largest = max(parts, key=lambda part: count_tokens(part, lengths, padded), default=None)
    if largest is None:
        return max(1, budget // 2)
    if len(largest) < 2:
        return None
    return max(1, min(budget, count_tokens(largest, lengths, padded)) // 2)


def out_of_memory_text(config: Config, longest: int | None, budget: int, reason: str) -> str:
    """Return one line for an update that does not fit: what a plan would change, level by level.

    ``longest``: tokens of the longest sequence, None where it is the optimizer that does not fit; ``budget``: tokens of
    a micro-batch.
    """
    adjusted = config.with_settings({"actor.max_tokens_per_micro_batch": budget})
    changes = actor_overrides(adjusted, longest or budget)
    levels = [f"({level}) {LEVEL_NAMES[level]}: {settings}" for level, settings in changes.items()]
    at_most = "in the optimizer's step" if longest is None else f"even with one sequence of {longest} tokens"
    helps = "what would help, from the cheapest"
    return f"the update does not fit into memory, {at_most}; {helps}: {'; '.join(levels)} ({reason})"
