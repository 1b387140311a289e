"""What happens at the same time: gradients beside sampling, and sampling ahead of training."""

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
    max_staleness: int = Field(
        0,
        ge=0,
        description="updates by which the weights that sample may be behind those that learn. 0: on-policy, engines "
        "wait for the update; 1: one-step-off, the next batch is sampled during the update; 2: two-step-off, the next "
        "one is also scored meanwhile (TRL: max_staleness; verl: async_training.staleness_threshold; prime-rl: "
        "max_async_level)",
    )
    in_flight: bool = Field(
        False,
        description="new weights are loaded while responses are being sampled, whose further tokens are theirs; false: "
        "between two batches, so that equal seeds give equal runs (verl: async_training.partial_rollout)",
    )
    recompute_cache: bool = Field(
        True,
        description="with in_flight: what responses under way have cached is computed again under the new weights; "
        "false: they go on with what older weights computed",
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
        samples = not config.algorithm.supervised  # otherwise a whole batch is there at once
        return samples and streaming_obstacle(config) is None and not config.on_the_actors_gpus()
    return config.schedule.streaming


def require_possible(config: Config) -> None:
    """Raise ValueError where what ``schedule`` asks to be done at the same time cannot be."""
    schedule = config.schedule
    if schedule.streaming is True and (why := streaming_obstacle(config)) is not None:
        raise ValueError(f"schedule.streaming=true: {why}; schedule.streaming=auto would do without")
    if schedule.max_staleness and config.cluster.offload is True:
        raise ValueError(
            f"schedule.max_staleness={schedule.max_staleness}: the actor is offloaded while engines on its GPUs "
            "sample, so they cannot work at the same time (cluster.offload); schedule.max_staleness=0, or GPUs of "
            "their own (rollout.colocate_with=null)"
        )
    if schedule.in_flight and not schedule.max_staleness:
        raise ValueError(
            "schedule.in_flight=true: with schedule.max_staleness=0 nothing is sampled while weights change; "
            "schedule.max_staleness=1 or more would do"
        )
    if schedule.in_flight and not config.rollout.engine_class.in_flight:
        raise ValueError(
            f"schedule.in_flight=true: rollout.engine={config.rollout.engine} takes weights between batches alone; "
            "rollout.engine=vllm or schedule.in_flight=false would do"
        )


def staleness_doubts(config: Config) -> str | None:
    """Return a warning where a loss is known to suffer from samples as old as these may be; None without one."""
    schedule, loss = config.schedule, config.algorithm.loss
    if config.algorithm.distils and loss.name == "reverse_kl" and schedule.max_staleness > 2:
        return (
            f"schedule.max_staleness={schedule.max_staleness} with algorithm.loss.name=reverse_kl: on samples of "
            "weights so far behind reverse KL is known to lose accuracy (AsyncOPD, arXiv 2606.24143); "
            "schedule.max_staleness=2 or less, or algorithm.loss.name=jsd or forward_kl, would do"
        )
    return None
