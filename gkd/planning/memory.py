"""Memory of every group of a layout, against what its cards have."""

from __future__ import annotations

from dataclasses import replace

from gkd.cluster.layout import GROUPS
from gkd.config import Engine, Pool
from gkd.planning.actor_memory import MicroBatch, Training, worst
from gkd.planning.cards import GIB
from gkd.planning.items import GroupMemory
from gkd.planning.subject import Subject

CONTEXT, COLLECTIVES = 0.6 * GIB, 0.5 * GIB  # CUDA's context with kernels; NCCL's buffers where there are several ranks
PROCESS = 0.6 * GIB  # the actor's process on a CPU: Python, torch and transformers
FRAGMENTED = 0.05  # of what comes and goes, held by torch's allocator without being used


def memory_of(subject: Subject) -> list[GroupMemory]:
    """Every group's, in the order GPUs are handed out. On a CPU each has what the others leave of the machine's."""
    found = [group_memory(subject, GROUPS.get(section, section), pool) for section, pool in subject.config.pools()]
    if not subject.card.is_cpu:
        return found
    engines = [pool.tensor_parallel_size if isinstance(pool, Engine) else 1 for _, pool in subject.config.pools()]
    whole = [group.total * group.n_gpus / tp for group, tp in zip(found, engines, strict=True)]
    return [replace(group, available=subject.card.memory - sum(whole) + group.total) for group in found]


def group_memory(subject: Subject, group: str, pool: Pool) -> GroupMemory:
    """One group's."""
    if isinstance(pool, Engine):
        from gkd.planning.engine_memory import engine_memory

        return engine_memory(subject, group, pool)
    return _actor(subject, pool)


def micro_batch(subject: Subject, world: int) -> MicroBatch:
    """The largest micro-batch a rank has. One sequence is never divided, so it holds the longest in any case."""
    work, actor = subject.work(), subject.config.actor
    share = -(-(actor.mini_batch_size or work.samples) // world)
    whole = max(share * (work.prompt + work.response), work.longest)
    tokens = min(max(actor.max_tokens_per_micro_batch, work.longest), whole)
    part = work.response / (work.prompt + work.response)
    return MicroBatch(tokens, max(1, round(tokens * part)), work.top_k, alone=tokens == whole)


def training(subject: Subject, world: int) -> Training:
    """How the actor trains on so many ranks."""
    actor, c = subject.config.actor, subject.compute
    return Training(subject.config.algorithm, world, c, actor.gradient_checkpointing, actor.loss_chunk, actor.lora)


def _actor(subject: Subject, pool: Pool) -> GroupMemory:
    world = pool.n_workers
    micro = micro_batch(subject, world)
    items = worst(subject.models.student, training(subject, world), micro)
    if subject.card.is_cpu:
        overhead = {"process": PROCESS}
    else:
        standing = sum(items.get(name, 0.0) for name in ("weights", "gradients", "optimizer state"))
        overhead = {
            "context, collectives": CONTEXT + (COLLECTIVES if world > 1 else 0),
            "fragmentation": FRAGMENTED * (sum(items.values()) - standing),
        }
    note = f"micro-batches of {micro.tokens:,} tokens, {micro.positions:,} of them responses"
    return GroupMemory("actor", world, items | overhead, subject.card.memory, "", (note,))
