"""When memory runs out: what that looks like, and smaller micro-batches to try again with."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from gkd.config import Config

_SIGNS = re.compile(
    "DefaultCPUAllocator|CUBLAS_STATUS_ALLOC_FAILED|CUDA (driver )?error: out of memory|Triton Error.*: out of memory"
    # NCCL's, which torch hands on as it is: "ncclUnhandledCudaError: ... Cuda failure 2 'out of memory'"
    "|Cuda failure (\\d+ )?'out of memory'|Failed to CUDA (host |)?(m|c)?alloc"
)
"""Of errors without a class of their own: torch's on a CPU, and those of libraries that allocate for themselves."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch could not allocate, on a GPU or on a CPU, where it has no error of its own for that."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _SIGNS.search(str(error)) is not None


def smaller_budget(budget: int, lengths: Sequence[int], parts: Sequence[Sequence[int]]) -> int | None:
    """Tokens a micro-batch may have after ``parts``, micro-batches of ``budget``, were too much.

    Half of what the largest had; None where that was one sequence alone. ``parts`` are indices into ``lengths``.
    """
    largest = max(parts, key=lambda part: sum(lengths[i] for i in part))
    if len(largest) < 2:
        return None
    return max(1, min(budget, sum(lengths[i] for i in largest)) // 2)


def out_of_memory_text(config: Config, world: int, longest: int | None, budget: int, reason: str) -> str:
    """What to say when an update does not fit: one line with three levels of advice, worked out for ``config``.

    ``longest``: tokens of the longest sequence, None where it is the optimizer that does not fit; ``budget``: tokens of
    a micro-batch.
    """
    told = "; ".join(
        f"({number}) {what}: {' '.join(overrides)}"
        for number, (what, overrides) in enumerate(_levels(config, world, longest, budget), start=1)
        if overrides
    )
    at_most = "in the optimizer's step" if longest is None else f"even with one sequence of {longest} tokens"
    return f"the update does not fit into memory, {at_most}; what would help, from the cheapest: {told} ({reason})"


def _levels(config: Config, world: int, longest: int | None, budget: int) -> list[tuple[str, list[str]]]:
    """Overrides not in force yet, by what they cost: only time, memory elsewhere, or another training."""
    actor, rollout = config.actor, config.rollout
    same = []
    if longest is not None and budget > longest:
        same.append(f"actor.max_tokens_per_micro_batch={max(longest, budget // 2)}")
    if not actor.gradient_checkpointing:
        same.append("actor.gradient_checkpointing=true")
    if actor.loss_chunk > 128:
        same.append(f"actor.loss_chunk={max(128, actor.loss_chunk // 4)}")
    elsewhere = [] if actor.offload_optimizer else ["actor.offload_optimizer=true"]
    elsewhere.append(f"trainer.n_gpus_per_node={2 * world}")
    other = ["actor.lora.r=16"] if actor.lora.r is None else []
    if actor.lora.r is not None and actor.lora.r > 4:
        other.append(f"actor.lora.r={actor.lora.r // 2}")
    if rollout.max_response_length > 64:
        other.append(f"rollout.max_response_length={rollout.max_response_length // 2}")
    if config.data.max_prompt_length > 256:
        other.append(f"data.max_prompt_length={config.data.max_prompt_length * 3 // 4}")
    return [("the same training, slower", same), ("memory elsewhere", elsewhere), ("another training", other)]
