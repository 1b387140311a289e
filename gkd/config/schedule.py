"""What happens at the same time: gradients beside sampling, and sampling ahead of training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gkd.config.base import Settings


class Schedule(Settings):
    """Stages of a run that go on at the same time."""

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
        "one is also scored meanwhile (TRL: max_staleness; verl: async_training.staleness_threshold, there a share of "
        "a batch; prime-rl: max_async_level)",
    )
    in_flight: bool = Field(
        False,
        description="new weights are loaded while responses are being sampled, whose further tokens are theirs; false: "
        "into each engine between two batches, so that equal seeds give equal runs with one engine, or where all get "
        "weights together (nccl), and rollout.max_num_seqs has places for all requests; else the last bits of "
        "log-probabilities depend on when requests come (verl: "
        "async_training.partial_rollout)",
    )
    recompute_cache: bool = Field(
        True,
        description="with in_flight: what responses under way have cached is computed again under the new weights; "
        "false: they go on with what older weights computed",
    )
