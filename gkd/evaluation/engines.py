"""A model in the engines of the rollout group, started for an evaluation, as what questions are put to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gkd.cluster.workers.engines import Engines, require_engines_run
from gkd.cluster.workers.environment import environment
from gkd.cluster.workers.group import gather
from gkd.cluster.workers.placement import Placement
from gkd.config import Config
from gkd.data.layouts import template_variables
from gkd.data.model_info import ModelInfo
from gkd.data.templates import begins_itself, special_ids_around
from gkd.errors import RunFailed, one_line
from gkd.evaluation.questions import Question
from gkd.evaluation.reloading import FurtherWeights
from gkd.evaluation.strategies import Messages, Reply
from gkd.inference.engine import EngineSpec
from gkd.rewards.completion import up_to_stop
from gkd.rollout.group import RolloutGroup
from gkd.types import Prompt, Sample, SampleRequest, Sampling, TrainingSample

WAIT_S = 0.05
"""How long strategies that wait for something else than a reply may have to wait for their turn."""


@dataclass(frozen=True)
class LocalModel:
    """A model in a directory: what tables call it, its files' fingerprint, its tokenizer and what it states of itself.

    ``weights``: those that it has in place of the directory's.
    """

    name: str
    path: str
    fingerprint: str
    tokenizer: Any
    info: ModelInfo
    weights: FurtherWeights | None = None


def start_engines(config: Config, placement: Placement, model: LocalModel, max_length: int) -> RolloutGroup:
    """Load ``model`` into engines on the workers of the placement, for sequences of at most ``max_length`` tokens.

    Raises ConfigError for a device that the engine is not for, RunFailed where a worker does not come up.
    """
    group, limit = placement.groups["rollout"], config.cluster.start_timeout_s
    require_engines_run(config, placement.groups)
    engines = Engines.from_group(group, config.rollout.tensor_parallel_size, limit)
    arguments = [
        (config, EngineSpec.for_rollout(config, model.path, model.info, max_length, rank, report.device))
        for rank, report in enumerate(engines.leaders.reports)
    ]
    threads = environment(group.reports[0].device, [model.path], config.cluster.cpu_threads)
    target = "gkd.rollout.worker:RolloutWorker", "gkd.rollout.worker:rollout_follower"
    gather(engines.submit_build(*target, arguments, threads), limit)
    require = placement.session.require_control
    return RolloutGroup(engines.leaders, config, followers=[engines.bind()], require=require)


class EngineReplies:
    """Replies of ``model`` in the engines of ``rollout``: requests go out as engines have places free."""

    def __init__(self, config: Config, model: LocalModel, rollout: RolloutGroup, max_length: int) -> None:
        self.model, self.rollout, self.timeout_s = model, rollout, config.rollout.timeout_s
        self.max_length = max_length
        self._capacity = config.rollout.slots
        self._wanted: list[tuple[SampleRequest, asyncio.Future[Sample]]] = []
        self._futures: dict[int, asyncio.Future[Sample]] = {}
        self._wake = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """Twice what all engines work on at the same time, so that none waits for a strategy."""
        return 2 * self._capacity * len(self.rollout.working_engines)

    async def reply(self, question: Question, prompt: str | Messages | None, sampling: Sampling, seed: int) -> Reply:
        """Have the engines sample a reply. Raises RunFailed for a prompt that is too long or that no template takes."""
        shown = question.prompt if prompt is None else make_prompt(question, prompt, self.model.tokenizer)
        if (length := len(shown.token_ids) + sampling.max_tokens) > self.max_length:
            raise RunFailed(
                f"a prompt of {len(shown.token_ids)} tokens with a reply of {sampling.max_tokens} makes {length}, and "
                f"the engines take {self.max_length} (data.max_prompt_length, max_response_length of the set)"
            )
        future: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        self._wanted.append((SampleRequest(shown, 0, seed, sampling), future))
        self._wake.set()
        sample = await future
        text = self.model.tokenizer.decode(sample.sampled_ids.tolist(), skip_special_tokens=True)
        return Reply(up_to_stop(text, sampling.stop), len(sample.sampled_ids), sample.finish_reason == "length")

    async def work(self) -> None:
        """Hand requests out and replies back. Raises RunFailed when none came for ``rollout.timeout_s``."""
        came, self._wake = time.monotonic(), asyncio.Event()  # of this loop: every measurement has its own
        while True:
            await asyncio.sleep(0)  # strategies go on first: what they ask goes out together
            if self._wanted:
                requests, self._wanted = self._wanted, []
                keys = self.rollout.submit([request for request, _ in requests])
                self._futures |= {key: future for key, (_, future) in zip(keys, requests, strict=True)}
            if not self._futures:
                self._wake.clear()
                await self._wake.wait()
                came = time.monotonic()
                continue
            samples = self.rollout.take(WAIT_S)
            self._hand_back(samples)
            if samples:
                came = time.monotonic()
            elif time.monotonic() - came > self.timeout_s:
                raise RunFailed(
                    f"{self.model.name}: none of {len(self._futures)} replies came within {self.timeout_s:g} s "
                    "(rollout.timeout_s)"
                )

    def _hand_back(self, samples: Sequence[TrainingSample]) -> None:
        for training, scored in zip(samples, self.rollout.fetch(samples), strict=True):
            future = self._futures.pop(training.key)
            if not future.done():
                future.set_result(scored.sample)


def make_prompt(question: Question, prompt: str | Messages, tokenizer: Any) -> Prompt:
    """Return a strategy's own prompt: a text as the question is put, messages by the chat template, as the set has it.

    Raises RunFailed for messages that the template does not take.
    """
    original = question.prompt
    if isinstance(prompt, str) and original.messages is not None:
        prompt = [*original.messages[:-1], {**original.messages[-1], "content": prompt}]
    before, after = list[int](), list[int]()
    try:
        if isinstance(prompt, str):
            text = prompt
            if not begins_itself(prompt, tokenizer.bos_token):
                before, after = special_ids_around(tokenizer)
        else:
            kwargs = template_variables(question.chat_template_kwargs, original.tools)
            text = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=False, **kwargs)
        ids = [*before, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], *after]
    except Exception as error:  # a template raises whatever it meets
        raise RunFailed(f"a strategy's messages do not become a prompt: {one_line(error)}") from None
    return replace(original, token_ids=np.asarray(ids, dtype=np.int32))
