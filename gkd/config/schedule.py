"""What happens at the same time: the actor's gradients beside sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from gkd.config.base import Settings

if TYPE_CHECKING:
    from gkd.config.run import Config


class Schedule(Settings):
    """What a run does at the same time."""

    streaming: Literal["auto", True, False] = Field(
        "auto",
        description="the actor adds up gradients of what has been scored while the rest of the batch is still being "
        "sampled; the update is the same. auto: where a step is one update and the actor has GPUs of its own",
    )


def streaming_obstacle(config: Config) -> str | None:
    """Return why gradients cannot be added up before the whole batch is there; None where they can."""
    actor, algorithm = config.actor, config.algorithm
    samples = config.trainer.batch_size * config.rollout.n
    if actor.epochs > 1:
        return f"actor.epochs={actor.epochs} learns from each batch several times"
    if actor.mini_batch_size is not None and actor.mini_batch_size < samples:
        return f"actor.mini_batch_size={actor.mini_batch_size} makes several updates of a batch"
    if algorithm.policy_weight and algorithm.dynamic_sampling.max_rounds > 1:
        rounds = algorithm.dynamic_sampling.max_rounds
        return f"algorithm.dynamic_sampling.max_rounds={rounds} chooses from the whole batch what is learned from"
    if algorithm.policy_weight and algorithm.advantage.selected.needs_batch:
        return f"algorithm.advantage.name={algorithm.advantage.name} looks at all groups of a batch"
    if config.cluster.offload is True:
        return "the actor is offloaded while engines on its GPUs sample (cluster.offload)"
    return None


def streams(config: Config) -> bool:
    """Return whether the actor adds up gradients while a batch is being sampled; ``cluster.offload`` is decided."""
    if config.schedule.streaming == "auto":
        return streaming_obstacle(config) is None and not config.on_the_actors_gpus()
    return config.schedule.streaming


def require_streaming(config: Config) -> None:
    """Raise ValueError where ``schedule.streaming=true`` cannot be."""
    if config.schedule.streaming is True and (why := streaming_obstacle(config)) is not None:
        raise ValueError(f"schedule.streaming=true: {why}; schedule.streaming=auto would do without")
