"""Memory of every group of a layout, against what its cards have."""

from __future__ import annotations

from dataclasses import replace

from gkd.config import GROUPS, Engine, Pool
from gkd.planning.actor_memory import F32, MicroBatch, Training, checkpoint_copy, on_host, worst
from gkd.planning.cards import GIB
from gkd.planning.items import GB, GroupMemory
from gkd.planning.subject import Subject

CONTEXT, COLLECTIVES = 0.6 * GIB, 0.5 * GIB  # CUDA's context with kernels; NCCL's buffers where there are several ranks
PROCESS = 0.6 * GIB  # the actor's process on a CPU: Python, torch and transformers
FRAGMENTED = 0.05  # of what comes and goes, held by torch's allocator without being used


def memory_of(subject: Subject, only: str | None = None) -> list[GroupMemory]:
    """Every group's, in the order GPUs are handed out; with ``only`` perhaps no more than bears on that group.

    On a CPU each has what the others leave of the machine's memory, on a GPU what those it shares it with leave: all of
    what they have, or, where they take turns, what they keep while they do not work.
    """
    pools = {GROUPS.get(section, section): pool for section, pool in subject.config.pools()}
    if only is not None and not subject.card.is_cpu and not subject.config.hosts():
        pools = {only: pools[only]}
    found = [group_memory(subject, group, pool) for group, pool in pools.items()]
    if not subject.card.is_cpu:
        turns = _turns_wanted(subject, found)
        if turns and "rollout" in subject.config.on_the_actors_gpus():
            found = [_at_push(group, found) if group.group == "actor" else group for group in found]
        return [replace(group, available=_left_by_others(subject, group, found, turns)) for group in found]
    engines = [pool.tensor_parallel_size if isinstance(pool, Engine) else 1 for _, pool in subject.config.pools()]
    whole = [group.total * group.n_gpus / tp for group, tp in zip(found, engines, strict=True)]
    return [replace(group, available=subject.card.memory - sum(whole) + group.total) for group in found]


def takes_turns(subject: Subject) -> bool:
    """Whether the actor and the engines on its GPUs are there one at a time (cluster.offload)."""
    if subject.card.is_cpu:
        return False
    pools = subject.config.pools()
    return _turns_wanted(subject, [group_memory(subject, GROUPS.get(name, name), pool) for name, pool in pools])


def _turns_wanted(subject: Subject, found: list[GroupMemory]) -> bool:
    config = subject.config
    engines = config.on_the_actors_gpus()
    if not engines or config.actor.lora.quantize is not None:
        return False
    if config.cluster.offload != "auto":
        return config.cluster.offload
    side_by_side = [replace(group, available=_left_by_others(subject, group, found, turns=False)) for group in found]
    return any(not memory.fits for memory in side_by_side if memory.group in ("actor", *engines))


def _left_by_others(subject: Subject, group: GroupMemory, found: list[GroupMemory], turns: bool) -> float:
    """What a card has for a group besides those that share its GPUs (``colocate_with``)."""
    shared = subject.config.may_share()
    others = [other for other in found if frozenset((group.group, other.group)) in shared]
    away = {other.group for other in others if turns and "actor" in (group.group, other.group)}
    return subject.card.memory - sum(_kept(other) if other.group in away else other.total for other in others)


def _at_push(actor: GroupMemory, found: list[GroupMemory]) -> GroupMemory:
    """The actor that takes turns, at its worst moment: perhaps when the engines' weights are there as well."""
    rollout = next(group for group in found if group.group == "rollout")
    standing = ("weights", "optimizer state", "context, collectives")
    moment = {name: actor.items[name] for name in standing if name in actor.items}
    moment["engine's weights"] = sum(rollout.items.get(name, 0.0) for name in ("weights", "weights being received"))
    if sum(moment.values()) <= actor.total:
        return actor
    return replace(actor, items=moment, notes=(*actor.notes, "most is needed when weights go to the engines"))


def _kept(memory: GroupMemory) -> float:
    """What a group that does not work keeps: its process on the card, and captured graphs."""
    return sum(memory.items.get(name, 0.0) for name in ("context, CUDA graphs", "context, collectives", "process"))


def group_memory(subject: Subject, group: str, pool: Pool) -> GroupMemory:
    """One group's."""
    if isinstance(pool, Engine):
        from gkd.planning.engine_memory import engine_memory

        return engine_memory(subject, group, pool)
    return _actor(subject, pool) if group == "actor" else _reward_model(subject, pool)


def _reward_model(subject: Subject, pool: Pool) -> GroupMemory:
    """A forward pass of as many sequences as are judged at a time, and the weights (gkd.inference.classifier)."""
    shape, c, settings = subject.models.of("reward_model"), subject.compute, subject.config.reward_model
    tokens = settings.max_num_seqs * min(settings.max_model_len, subject.work().longest)
    width = max(layers.width for layers in shape.layers)
    items = {
        "weights": float(c * (shape.n_parameters - (0 if shape.tied else shape.head))),  # it has one output instead
        "activations": float(tokens * c * max(4 * shape.hidden + 3 * width, 10 * shape.hidden)),  # MLP, or attention
        "process": PROCESS if subject.card.is_cpu else CONTEXT,
    }
    return GroupMemory("reward_model", pool.n_workers, items, subject.card.memory)


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
    offloaded = actor.offload_optimizer and not subject.card.is_cpu
    return Training(
        subject.config.algorithm,
        world,
        c,
        actor.gradient_checkpointing,
        actor.loss_chunk,
        actor.lora,
        frozen=F32 if subject.card.is_cpu else c,
        offloaded=offloaded,
    )


def _actor(subject: Subject, pool: Pool) -> GroupMemory:
    world = pool.n_workers
    micro = micro_batch(subject, world)
    how = training(subject, world)
    items, host = worst(subject.models.student, how, micro), on_host(subject.models.student, how)
    if subject.card.is_cpu:
        overhead = {"process": PROCESS}
    else:
        standing = sum(items.get(name, 0.0) for name in ("weights", "gradients", "optimizer state"))
        overhead = {
            "context, collectives": CONTEXT + (COLLECTIVES if world > 1 else 0),
            "fragmentation": FRAGMENTED * (sum(items.values()) - standing),
        }
    notes = [f"micro-batches of {micro.tokens:,} tokens, {micro.positions:,} of them responses"]
    if host:
        notes.append(f"{host / GB:.1f} GB of the host's memory for each GPU")
    if subject.config.trainer.save_minutes is not None or subject.config.trainer.save_every is not None:
        copy = checkpoint_copy(subject.models.student, how)
        notes.append(f"{copy / GB:.1f} GB of the host's memory for each rank while a checkpoint is written")
    return GroupMemory("actor", world, items | overhead, subject.card.memory, "", tuple(notes), host)
