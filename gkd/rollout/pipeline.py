"""What happens to a sample once it is finished: teacher, reference, rewards and reward model score it, all at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gkd.config import Config
from gkd.data.layouts import template_variables
from gkd.data.tokenizer import load_tokenizer, tokenizer_hash
from gkd.errors import describe_error, one_line
from gkd.inference.requests import RateRequest, ScoreRequest
from gkd.inference.vllm_environment import find_session_directory
from gkd.rewards.completion import Completion, up_to_stop, without_stop
from gkd.rewards.pool import RewardPool
from gkd.rewards.process import RewardError, Timed, require_finite
from gkd.rollout.output_queue import SampleAndArrays
from gkd.scoring.client import ScoringClient
from gkd.types import Int32, Prompt, Sample, ScoredSample, Spans, Target, TrainingSample, teacher_of


@dataclass(slots=True, eq=False)
class _Pending:
    """A sample whose scores are awaited: of the models by "teacher" and "reference", of the rewards by their names.

    ``completion``: what the rewards see of it, where they are wanted.
    """

    sample: Sample
    generated_s: float
    completion: Completion | None = None
    models: dict[str, Future[Target]] = field(default_factory=dict)
    rewards: dict[str, Future[Timed]] = field(default_factory=dict)


class ScoringPipeline:
    """Has each sample scored by the scorers of its request, and calls ``deliver`` with it when all of them are done.

    Samples that a reward rates together are delivered together: who loses this process loses all of them or none.
    ``deliver`` is also called with the errors of models that could not score, each in place of its sample. The
    student's tokenizer, in ``model_path``, decodes responses for the reward functions. ``rank`` is that of the engine.
    """

    def __init__(
        self,
        config: Config,
        model_path: str,
        rank: int,
        deliver: Callable[[list[SampleAndArrays] | BaseException], None],
    ) -> None:
        self._config, self.rank, self._deliver = config, rank, deliver
        self._groups: dict[int, list[_Pending]] = {}  # that are not whole, by the key of their first sample
        self._clients: dict[str, ScoringClient] = {}
        self._tokenizer = load_tokenizer(model_path)
        self._rewards = RewardPool(config.reward, find_session_directory()) if config.algorithm.policy_weight else None
        # The reward model's tokenizer, and whether it is the student's.
        self._reward_tokenizer: tuple[Any, bool] | None = None
        if config.has_reward_model_group:
            tokenizer = load_tokenizer(config.reward_model.model.path or "", "reward_model.model.path")
            self._reward_tokenizer = tokenizer, tokenizer_hash(tokenizer) == tokenizer_hash(self._tokenizer)

    def connect(self, scorers: Mapping[str, dict[str, Any]]) -> None:
        """Connect to the servers of the models that score; arguments by name, of :class:`ScoringClient`.

        Raises ConfigError where student and scorer do not fit together, RunFailed when a server does not answer.
        """
        for name, arguments in scorers.items():
            self._clients[name] = ScoringClient(**arguments)
            self._clients[name].connect()

    def expect_scorer(self, scorer: str, name: str, within_s: float, address: str, suspect: bool) -> None:
        """Wait for a server that is started or suspect; as :meth:`gkd.scoring.client.ScoringClient.expect`."""
        if scorer in self._clients:
            self._clients[scorer].expect(name, within_s, address, suspect)

    def submit(self, sample: Sample) -> None:
        """Start scoring a finished sample; never blocks."""
        pending = _Pending(sample, time.time())
        self._score_by_models(pending)
        if sample.request.scoring.rewards:
            self._score_by_rewards(pending)
        if (group := self._join_group(pending)) is None:
            return
        futures: list[Future[Any]] = [future for member in group for future in member.models.values()]
        futures += [future for member in group for future in member.rewards.values()]
        if not futures:
            self._hand_on(group)
            return
        n_unfinished, lock = [len(futures)], threading.Lock()

        def count_down(_: Future[Any]) -> None:
            with lock:
                n_unfinished[0] -= 1
                done = n_unfinished[0] == 0
            if not done:
                return
            try:
                self._hand_on(group)
            except BaseException as error:  # a future's callback would swallow it, and the sample would be waited for
                self._deliver(error)

        for future in futures:
            future.add_done_callback(count_down)

    def close(self) -> None:
        """End the connections and the processes of the rewards."""
        for client in self._clients.values():
            client.close()
        if self._rewards is not None:
            self._rewards.close()

    def _join_group(self, pending: _Pending) -> list[_Pending] | None:
        """Return the samples that go on together now that ``pending`` is there, by index; None while some are missing.

        What rates them together begins with it.
        """
        request = pending.sample.request
        group = self._groups.setdefault(request.key - request.index, [])
        group.append(pending)
        if len(group) < request.scoring.group_size:
            return None
        del self._groups[request.key - request.index]
        group.sort(key=lambda member: member.sample.request.index)
        completions = [member.completion for member in group if member.completion is not None]
        if self._rewards is not None and completions:
            for member, rewards in zip(group, self._rewards.submit_group(completions), strict=True):
                member.rewards |= rewards
        return group

    def _score_by_models(self, pending: _Pending) -> None:
        sample = pending.sample
        prompt, scoring = sample.request.prompt, sample.request.scoring
        if scoring.top_k is not None:
            ids, spans = with_prompt(sample, prompt.teacher_prompt_ids)
            score = ScoreRequest(ids, spans, scoring.top_k, scoring.temperature)
            pending.models["teacher"] = self._clients[teacher_of(prompt)].submit(score, _order(sample))
        if scoring.reference:
            score = ScoreRequest(sample.token_ids, sample.spans, 0, sample.request.sampling.temperature)
            pending.models["reference"] = self._clients["reference"].submit(score, _order(sample))

    def _score_by_rewards(self, pending: _Pending) -> None:
        assert self._rewards is not None, "rewards are wanted only where the configuration has them"
        sample = pending.sample
        prompt, ids, stops = sample.request.prompt, sample.sampled_ids, sample.request.sampling.stop
        response = self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        if self._reward_tokenizer is not None:
            for name in self._config.reward.functions_scored_by("reward_model"):
                pending.rewards[name] = self._rate(sample, response, *self._reward_tokenizer)
        pending.completion = Completion(
            prompt=prompt.text,
            response=without_stop(up_to_stop(response, stops), stops),
            answer=prompt.answer,
            other_answers=prompt.other_answers,
            columns=prompt.columns,
            messages=prompt.messages,
            n_tokens=len(ids),
            max_tokens=sample.request.sampling.max_tokens,
            truncated=sample.finish_reason == "length",
            token_ids=tuple(ids.tolist()) if self._config.reward.own_functions() else None,
            step=min(span.version for span in sample.versions),
            total_steps=self._config.trainer.total_steps,
        )
        pending.rewards |= self._rewards.submit(pending.completion)

    def _rate(self, sample: Sample, response: str, tokenizer: Any, same_tokenizer: bool) -> Future[Timed]:
        """Return the reward model's reward and how long it took to come; arguments of :func:`reward_model_ids`."""
        timed = Future[Timed]()
        prompt = sample.request.prompt
        after_prompt = sample.token_ids[len(prompt.token_ids) :]
        try:
            ids = reward_model_ids(prompt, after_prompt, response, tokenizer, same_tokenizer)
        except Exception as error:  # a template computes with what the messages hold, and raises what it meets
            why = f"reward_model.model.path: its chat template refuses prompt {prompt.id}: {describe_error(error)}"
            timed.set_exception(RewardError(why))
            return timed
        started = time.monotonic()

        def finish(reward: Future[float]) -> None:
            try:
                timed.set_result((require_finite(reward.result()), time.monotonic() - started))
            except Exception as error:
                timed.set_exception(error)

        self._clients["reward_model"].submit(RateRequest(ids), _order(sample)).add_done_callback(finish)
        return timed

    def _hand_on(self, group: Sequence[_Pending]) -> None:
        """Hand on samples that are scored, or the error of a model that could not."""
        models = [future for member in group for future in member.models.values()]
        failures = [error for error in (future.exception() for future in models) if error is not None]
        self._deliver(failures[0] if failures else [self._combine(member) for member in group])

    def _combine(self, pending: _Pending) -> SampleAndArrays:
        sample = pending.sample
        targets = {name: future.result() for name, future in pending.models.items()}
        rewards: dict[str, float | str] = {}
        reward_s: dict[str, float] = {}
        for name, future in pending.rewards.items():
            if (error := future.exception()) is not None:
                rewards[name] = one_line(error) if isinstance(error, RewardError) else describe_error(error)
                continue
            reward, reward_s[name] = future.result()
            if reward is not None:  # it does not apply to this sample
                rewards[name] = reward
        reference = targets["reference"].token_logprobs if "reference" in targets else None
        training = TrainingSample.from_sample(
            sample,
            self.rank,
            pending.generated_s,
            rewards=rewards,
            reward_s=reward_s,
            kl_reference=None if reference is None else float((sample.sampled_logprobs - reference).sum()),
        )
        return training, ScoredSample(sample, targets.get("teacher"), reference)


def _order(sample: Sample) -> tuple[float, int]:
    """Return the place of a sample's requests among those that wait: what is trained first is awaited first."""
    return sample.request.order, sample.request.key


def with_prompt(sample: Sample, prompt_ids: Int32) -> tuple[Int32, Spans]:
    """Return a trajectory's tokens with ``prompt_ids`` [Q] for its prompt [P], and the places of the sampled."""
    n_prompt = len(sample.request.prompt.token_ids)
    shift = len(prompt_ids) - n_prompt
    ids = np.concatenate([prompt_ids, sample.token_ids[n_prompt:]])
    return ids, tuple((start + shift, stop + shift) for start, stop in sample.spans)


def reward_model_ids(prompt: Prompt, response_ids: Int32, response: str, tokenizer: Any, same_tokenizer: bool) -> Int32:
    """Return what the reward model reads: the student's tokens where it has its tokenizer, else the text anew.

    The text goes through the model's chat template if it has one, with the row's tools, the prompt as the user's
    message where the data gave no messages.
    """
    if same_tokenizer:
        return np.concatenate([prompt.token_ids, response_ids])
    if tokenizer.chat_template is None:
        ids = tokenizer(prompt.text + response)["input_ids"]
    else:
        messages = [*(prompt.messages or [{"role": "user", "content": prompt.text}])]
        messages.append({"role": "assistant", "content": response})
        variables = template_variables({}, prompt.tools)
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **variables)["input_ids"]
    return np.asarray(ids, dtype=np.int32)
