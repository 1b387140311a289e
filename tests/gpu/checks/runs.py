"""Whole runs on the built-in task: eager and captured, side by side and in turn, by every way of the weights."""

from __future__ import annotations

import math

from gkd.config import TRANSFERS
from gkd.driver.checkpoints.checkpoint import find_newest_intact
from tests.gpu.checks.context import Context, Skipped, require
from tests.gpu.checks.phases import PHASES, read_phases
from tests.gpu.checks.program import SMALL_TASK, SMALLER_TASK, Run, read_steps, require_room, run

MOST_MISMATCH = 0.02  # nats a token between sampler and trainer
EAGER = ("rollout.enforce_eager=true", "teacher.enforce_eager=true", "actor.compile=false")
ONE_GPU = ("placement=single_gpu", "weights.checksum=true", "trainer.val_every=1000", "trainer.batch_size=32")


def eager(context: Context) -> None:
    """Ten steps, all groups on one GPU; sampler and trainer agree while the weights move."""
    _agrees(context, _ten_steps(context, "eager", *EAGER))


def graphs(context: Context) -> None:
    """The same with engines that are compiled and captured as graphs: they sample what was pushed, or the two part."""
    _agrees(context, _ten_steps(context, "graphs", "actor.compile=false"))


def ahead(context: Context) -> None:
    """Sampling a step ahead, with weights that are loaded under running requests: fresh tokens agree all the same."""
    overrides = (*ONE_GPU, *EAGER, "schedule.max_staleness=1", "schedule.in_flight=true", "trainer.total_steps=4")
    result = run(context, "ahead", *_task(context), *overrides)
    _agrees(context, result)
    oldest = result.largest("staleness/max")
    context.note(staleness_max=oldest)
    require(oldest == 1, f"samples are up to {oldest:g} updates behind, expected 1")


def _way(context: Context, name: str) -> str:
    """Return what stands for a way of the weights between GPUs in a rehearsal, else its name."""
    if not context.rehearsal:
        return name
    from tests.gpu.simulated import NAMES

    return NAMES.get(name, name)


def _went_by(context: Context, result: Run, name: str) -> None:
    way = _way(context, name)
    require(f"by {way} (" in result.text, f"the weights of {result.output.name} did not go by {way}")


def _ten_steps(context: Context, name: str, *overrides: str) -> Run:
    n_steps = 3 if context.rehearsal else 10
    return run(context, name, *_task(context), *ONE_GPU, f"trainer.total_steps={n_steps}", *overrides)


def _agrees(context: Context, result: Run, moves: bool = True) -> None:
    """Sampler and trainer agree in every step of a run whose weights moved, and the losses are numbers."""
    name, worst = result.output.name, result.largest("mismatch/kl")
    context.note({f"{name}_mismatch_kl_max": worst})
    require(worst < MOST_MISMATCH, f"mismatch/kl is up to {worst:.3g}, expected below {MOST_MISMATCH}")
    losses = [row["distill/loss"] for row in result.steps if "distill/loss" in row]
    require(all(math.isfinite(loss) for loss in losses), f"losses {losses}")
    if moves and losses:
        context.note({f"{name}_losses": losses})
        require(abs(losses[-1] - losses[0]) > 0.01, f"the weights hardly moved: losses {losses}")


def colocation(context: Context) -> None:
    """Engines sleep while the actor works and the other way round; a checkpoint in between is complete.

    Its figures have the memory of each worker after each phase, every time.
    """
    overrides = (*ONE_GPU, *EAGER, "cluster.offload=true", "trainer.save_every=2", "trainer.total_steps=4")
    file = context.scratch / "phases.jsonl"
    program = ("tests.gpu.checks.phases", str(file))
    result = run(context, "colocation", *_task(context), *overrides, program=program)
    phases = read_phases(file)
    context.note(phases=phases)
    lacking = set(PHASES) - {name.partition(",")[0] for name in phases}
    require(not lacking, f"no worker noted its memory after {sorted(lacking)}")
    unseen = [phase for phase, noted in phases.items() if not {"allocated_gb", "free_gb"} <= noted.keys()]
    require(context.rehearsal or not unseen, f"of the GPU nothing was noted after {unseen}")
    _agrees(context, result)
    saved, damaged = find_newest_intact(result.output / "checkpoints")
    require(saved is not None and not damaged, f"no checkpoint is intact; damaged are {damaged}")
    require("is offloaded" in result.text, "no group was offloaded")


def transfers(context: Context) -> None:
    """The same run by the object store as by ipc: equal seeds, losses that differ by what rounding makes of them."""
    other = context.scratch / "eager"
    if (other / "summary.json").exists():  # of the check before, which ended well
        first = Run(other, other.with_suffix(".txt").read_text(errors="replace"), read_steps(other), 0.0, None)
    else:
        first = _ten_steps(context, "ipc", *EAGER, f"weights.transfer={_way(context, 'ipc')}")
    second = _ten_steps(context, "object_store", *EAGER, "weights.transfer=object_store")
    _agrees(context, second)
    for way, result in (("ipc", first), ("object_store", second)):
        _went_by(context, result, way)
    pairs = [(a["distill/loss"], b["distill/loss"]) for a, b in zip(first.steps, second.steps, strict=True)]
    apart = [abs(a - b) / abs(b) for a, b in pairs]
    context.note(first_step_apart=apart[0], mean_apart=sum(apart) / len(apart))
    require(apart[0] < 0.1, f"the first losses, before any push, are {pairs[0]}")
    require(sum(apart) / len(apart) < 0.15, f"losses by ipc and by the object store: {pairs}")


def little_memory(context: Context) -> None:
    """Rewards, two updates a batch, adapters over 4-bit weights, checkpointing, the optimizer on the host."""
    overrides = ("actor.epochs=2", "actor.lora.r=8", "actor.lora.quantize=nf4", "actor.offload_optimizer=true")
    overrides += ("actor.gradient_checkpointing=true", "trainer.total_steps=3", "trainer.batch_size=8", "rollout.n=8")
    overrides += ("placement=single_gpu", "trainer.val_every=1000", "rollout.enforce_eager=true")
    overrides += ("data.sort_digits.digits=2",)  # of more, all answers are wrong at first, and nothing is learnt
    result = run(context, "grpo", *_task(context), *overrides, recipe="grpo")
    _agrees(context, result, moves=False)
    require(result.largest("actor/grad_norm") > 0, "all samples of each prompt had one reward: nothing was trained")
    require((result.output / "model" / "adapter").is_dir(), "no adapter was written")


def host_weights(context: Context) -> None:
    """Weights and moments on the host, layers compiled and computed again in the backward pass."""
    overrides = ("actor.offload_weights=true", "actor.gradient_checkpointing=true", "actor.compile=true")
    overrides += ("rollout.enforce_eager=true", "teacher.enforce_eager=true", "trainer.total_steps=4")
    _agrees(context, run(context, "host_weights", *_task(context), *ONE_GPU, *overrides))


def curve(context: Context) -> None:
    """README's first command, no setting changed: how long it takes, and how much of the teacher it reaches."""
    overrides = ("trainer.total_steps=4", *_task(context)) if context.rehearsal else ()
    result = run(context, "curve", *overrides)
    _agrees(context, result)
    summary = result.summary()
    before, after = (summary[when]["val/accuracy"] for when in ("before", "after"))
    teacher = summary["teacher"]["val/accuracy"]
    context.note(before=before, after=after, teacher=teacher, wall_s=summary["wall_s"])
    context.note(curve={row["step"]: row["val/accuracy"] for row in result.steps if "val/accuracy" in row})
    if not context.rehearsal:
        require(after > 0.9 * teacher, f"accuracy {before} -> {after}, the teacher has {teacher}")


def two_gpus(context: Context) -> None:
    """Weights over NCCL from one GPU to the other; then two FSDP ranks and an engine on both."""
    apart = ("trainer.gpus=0", "rollout.gpus=1", "teacher.gpus=1", "teacher.colocate_with=rollout", *EAGER)
    apart += ("rollout.gpu_memory_utilization=0.3", "teacher.gpu_memory_utilization=0.3", "weights.checksum=true")
    result = run(context, "nccl", *_task(context), *apart, "trainer.total_steps=4", "trainer.val_every=1000")
    _went_by(context, result, "nccl")
    _agrees(context, result)
    both = ("placement=2gpu", "rollout.tensor_parallel_size=2", *EAGER, "weights.checksum=true")
    result = run(context, "both", *_task(context), *both, "trainer.total_steps=4", "trainer.val_every=1000")
    _went_by(context, result, "ipc")
    _agrees(context, result)


def shards(context: Context) -> None:
    """Weights by vLLM's own ways for shards, each with what it needs installed; of two FSDP ranks from 3 GPUs on.

    In a rehearsal as of 3 GPUs; ``sharded_rdt``, for which nothing stands, is planned alone.
    """
    n_gpus = context.n_gpus or 3
    ways = {way: _way(context, way) for way in ("nccl_m2n", "sharded_rdt")}
    lacking = {way: reason for way, name in ways.items() if (reason := TRANSFERS.load(name).find_lacking())}
    context.note(lacking=lacking)
    for way, name in ways.items():
        if context.rehearsal:
            require_room(n_gpus, *_task(context), *_shards_apart(n_gpus), f"weights.transfer={way}")
        if way not in lacking:
            result = run(context, way, *_task(context), *_shards_apart(n_gpus), f"weights.transfer={name}")
            _went_by(context, result, way)
            _agrees(context, result)
    if len(lacking) == len(ways):
        raise Skipped("; ".join(f"{way}: {reason}" for way, reason in lacking.items()))


def _shards_apart(n_gpus: int) -> tuple[str, ...]:
    engine = 1 if n_gpus == 2 else 2
    return (
        "trainer.gpus=0" if engine == 1 else "trainer.gpus=0-1", f"rollout.gpus={engine}", f"teacher.gpus={engine}",
        "teacher.colocate_with=rollout", "rollout.gpu_memory_utilization=0.3", "teacher.gpu_memory_utilization=0.3",
        "trainer.total_steps=4", "trainer.val_every=1000", *EAGER,
    )  # fmt: skip


def _task(context: Context) -> tuple[str, ...]:
    return SMALLER_TASK if context.rehearsal else SMALL_TASK
