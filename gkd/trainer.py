"""The training loop: sample, score, update, send the weights back, over and over."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gkd.actor.group import ActorGroup
from gkd.algorithms.top_k import top_k_wanted
from gkd.cluster.group import Group, memory_of
from gkd.config import Config
from gkd.data.prompts import PromptStream
from gkd.observability import metrics as measured
from gkd.observability.metrics import JsonLines
from gkd.observability.progress import Progress
from gkd.observability.samples import SampleLog
from gkd.rollout.group import RolloutGroup
from gkd.sample import Prompt, Request, Sampling
from gkd.validation import Validation


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything the loop drives, started and holding the same weights."""

    prompts: PromptStream
    rollout: RolloutGroup
    actor: ActorGroup
    validation: Validation
    teacher: Group | None
    n_gpus: int
    vocab_size: int

    def memory(self) -> dict[str, float]:
        """memory/* of every group."""
        teacher = {} if self.teacher is None else memory_of(self.teacher)
        return memory_of(self.actor.group) | self.rollout.memory() | teacher


def train(config: Config, parts: Parts, log: JsonLines, samples: SampleLog, progress: Progress) -> dict[str, float]:
    """Run ``trainer.total_steps`` steps and the validations; returns the last validation.

    A step is counted, logged and validated only after the actor has been updated and the engines serve its weights.
    """
    top_k = top_k_wanted(config, parts.vocab_size)
    temperature = config.algorithm.loss.temperature
    validated: dict[str, float] = {}
    for step in range(1, config.trainer.total_steps + 1):
        started, clock = time.monotonic(), time.time()
        requests = responses_wanted(config, next(parts.prompts), step)
        records = parts.rollout.sample(requests, top_k, temperature, config.rollout.timeout_s)
        sampled = time.monotonic()
        row = parts.actor.update(records, step)
        updated = time.monotonic()
        staleness = measured.of_batch(records, parts.actor.version - 1)
        parts.rollout.receive(parts.actor.publish(), config.weights.timeout_s)
        done = time.monotonic()
        row |= staleness | measured.of_stages(clock, records, clock + sampled - started)
        row |= {"timing_s/update": updated - sampled, "timing_s/sync": done - updated, "timing_s/step": done - started}
        row |= throughput(sum(r.n_tokens for r in records), done - started, parts.n_gpus)
        row |= parts.memory()
        samples.write(step, records)
        if step % config.trainer.val_every == 0 or step == config.trainer.total_steps:
            validated = parts.validation.run()
            row |= validated
        log.write({"step": step, "epoch": parts.prompts.epoch, **measured.finite(row)})
        progress.step(step, row)
    return validated


def responses_wanted(config: Config, prompts: Sequence[Prompt], step: int) -> list[Request]:
    """``rollout.n`` requests a prompt, each with a seed of its own that depends on nothing but its place in the run."""
    sampling = Sampling(config.rollout.max_response_length, config.rollout.temperature, config.rollout.top_p)
    return [
        Request(prompt, index, seed_of(config.trainer.seed, step, place, index), sampling)
        for place, prompt in enumerate(prompts)
        for index in range(config.rollout.n)
    ]


def seed_of(*place: int) -> int:
    """A 31-bit seed from a place in the run, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=4).digest()) >> 1


def throughput(n_tokens: int, seconds: float, n_gpus: int) -> dict[str, float]:
    """perf/*: prompt and response tokens a second, also by each of all groups' GPUs, simulated ones included."""
    rate = n_tokens / seconds
    return {"perf/tokens_per_second": rate, "perf/tokens_per_second_per_gpu": rate / n_gpus}
