"""val/accuracy, val/reward/* and val/reverse_kl on held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace

from gkd.actor.group import ActorGroup
from gkd.algorithms.training_samples import require_measured, validation_rewards
from gkd.cluster.workers.deadline import Deadline
from gkd.config import Config
from gkd.config.top_k import top_k_for_validation
from gkd.config.validating import require_figures
from gkd.driver.inputs.find import Inputs
from gkd.driver.validation.final_scores import Scores, key_by_question
from gkd.errors import RunFailed
from gkd.evaluation.scores import accuracy
from gkd.inference.requests import GenerateRequest
from gkd.rewards.completion import up_to_stop, without_stop
from gkd.rollout.dataset_answers import DatasetAnswers
from gkd.rollout.engine_group import POLL_EVERY_S
from gkd.rollout.group import RolloutGroup
from gkd.scoring.client import ScoringClient
from gkd.types import Int32, Prompt, SampleRequest, Sampling, Scoring, TrainingSample, teacher_of

SEED = 1  # the same samples' seeds at every validation, so that curves are comparable


@dataclass(frozen=True, slots=True)
class RequestedValidation:
    """Keys of what a validation has requested: answers ``drawn`` at temperature 1, and ``greedy`` ones."""

    drawn: list[int]
    greedy: list[int]


class Validation:
    """Measures the student on the same held-out prompts again and again.

    - ``val/accuracy``: the share of greedy answers that are right, measured where the data has answers.
    - ``val/reward/*``: the run's own rewards of the greedy answers, measured where it has rewards.
    - ``val/reverse_kl``: the mean over response tokens of KL(student || teacher), in nats, on one response a prompt
      sampled from the student at temperature 1, measured where there is a teacher.
    - ``val/loss``: the cross-entropy of the data's own answers, where ``answers`` are what is learned from.
    """

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        rollout: RolloutGroup,
        actor: ActorGroup,
        teachers: Mapping[str, ScoringClient],
        answers: DatasetAnswers | None = None,
    ) -> None:
        self.config, self.prompts, self.tokenizer = config, inputs.val.prompts, inputs.tokenizer
        self.rollout, self.actor, self.teachers, self.answers = rollout, actor, teachers, answers
        self.vocabulary = inputs.model.vocabulary
        self.scores: Mapping[str, Scores] = {}
        """Of the last greedy answers, by question (:func:`key_by_question`): accuracy, and reward/NAME."""
        self.rewarded = _is_rewarded(config)

    def run(self) -> dict[str, float]:
        """Measure the student as it is."""
        return self.measure(self.request())

    def request(self, order: float = 0) -> RequestedValidation:
        """Request the answers that are measured, from the weights that the engines have now.

        ``order``: as of :meth:`gkd.rollout.group.RolloutGroup.submit`.
        """
        drawn: list[SampleRequest] = []
        if self.teachers:
            scoring, sampling = Scoring(top_k_for_validation(self.config, self.vocabulary)), self._sampling_at(1.0)
            drawn = [SampleRequest(p, 0, SEED + i, sampling, scoring) for i, p in enumerate(self.prompts)]
        scoring, sampling = Scoring(rewards=self.rewarded), self._sampling_at(0.0)
        greedy = [SampleRequest(p, 0, SEED, sampling, scoring) for p in self._greedy_prompts]
        return RequestedValidation(
            *(self.rollout.submit(requests, order) if requests else [] for requests in (drawn, greedy))
        )

    def measure(self, requested: RequestedValidation) -> dict[str, float]:
        """Wait for the answers and measure. Raises RunFailed for an answer of other weights than the actor has."""
        limit, metrics = self.config.rollout.timeout_s, dict[str, float]()
        # All of them first: engines that share the actor's GPUs sleep while it computes.
        drawn, greedy = (self.rollout.collect(keys, limit) for keys in (requested.drawn, requested.greedy))
        require_measured([*drawn, *greedy], self.actor.version)
        if self.answers is not None and (samples := self.answers.make_samples(self.prompts)):
            metrics["val/loss"] = self.actor.cross_entropy(samples)
        if drawn:
            metrics["val/reverse_kl"] = self.actor.evaluate(drawn)["distill/reverse_kl"]
        return metrics | (self._measure_greedy(greedy) if greedy else {})

    def _sampling_at(self, temperature: float) -> Sampling:
        """Return how answers are drawn: from the student as it is, ending where responses in training end."""
        rollout = self.config.rollout
        return Sampling(rollout.max_response_length, temperature, stop=tuple(rollout.stop))

    @property
    def _greedy_prompts(self) -> list[Prompt]:
        """Those that are answered greedily; where a reward compares with answers, those that have one."""
        needed = not self.rewarded or bool(self.config.reward.functions_needing_answers())
        return [p for p in self.prompts if p.answer is not None or not needed]

    def _measure_greedy(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        """Measure greedy answers."""
        metrics = validation_rewards(self.config, samples) if self.rewarded else {}
        prompts = self._greedy_prompts
        scores = {p.id: self._rewards(s) for p, s in zip(prompts, samples, strict=True)}
        if with_answers := [p for p in self.prompts if p.answer is not None]:
            answers = {s.sample.request.prompt.id: s.sample.sampled_ids for s in self.rollout.fetch(samples)}
            right = self._rate([(p, answers[p.id]) for p in with_answers])
            metrics["val/accuracy"] = sum(right) / len(right)
            for prompt, is_right in zip(with_answers, right, strict=True):
                scores[prompt.id]["accuracy"] = is_right
        self.scores = key_by_question(prompts, scores)
        return metrics

    def _rewards(self, sample: TrainingSample) -> dict[str, float]:
        """Return what each reward gave an answer, as reward/NAME."""
        labels = self.config.reward.labels()
        rewards = sample.rewards if self.rewarded else {}
        return {f"reward/{labels[name]}": value for name, value in rewards.items() if not isinstance(value, str)}

    def teacher(self) -> dict[str, float]:
        """Return the teacher's accuracy on the same prompts; its divergence from itself is not a measurement."""
        prompts = [p for p in self.prompts if p.answer is not None]
        if not prompts or not self.teachers:
            return {}
        self.rollout.colocation.wake_engines()
        length = self.config.rollout.max_response_length
        futures = [self.teachers[teacher_of(p)].submit(GenerateRequest(p.teacher_prompt_ids, length)) for p in prompts]
        limit = self.config.rollout.timeout_s
        late, deadline = set(futures), Deadline(limit)
        while late and not deadline.is_over():
            done, late = wait(late, POLL_EVERY_S)
            deadline = Deadline(limit) if done else deadline
            self.rollout.attend(wait_s=0.0)  # a replica that dies meanwhile is started again
        if late:
            raise RunFailed(
                f"the teacher has not answered {len(late)} of {len(futures)} validation prompts, and none for "
                f"{limit:g} s (rollout.timeout_s)"
            )
        right = self._rate([(self._see_as_teacher(p), f.result()) for p, f in zip(prompts, futures, strict=True)])
        return {"val/accuracy": sum(right) / len(right)}

    def _see_as_teacher(self, prompt: Prompt) -> Prompt:
        """Return a prompt with the text that the teacher's answer goes on from: of its own template, if it has one."""
        ids = prompt.teacher_ids
        return prompt if ids is None else replace(prompt, text=self.tokenizer.decode(ids.tolist()))

    def _rate(self, answers: Sequence[tuple[Prompt, Int32]]) -> list[float]:
        stops = self.config.rollout.stop
        replies = [self.tokenizer.decode(ids.tolist(), skip_special_tokens=True) for _, ids in answers]
        texts = [without_stop(up_to_stop(reply, stops), stops) for reply in replies]
        return [accuracy(text, prompt) for text, (prompt, _) in zip(texts, answers, strict=True)]


def _is_rewarded(config: Config) -> bool:
    return config.algorithm.policy_weight > 0 and bool(config.reward.functions)


def require_measurable(config: Config, inputs: Inputs) -> None:
    """Raise ConfigError for a figure that is to keep a student or to end the run, and that no validation can measure.

    What a set's answers are scored by, and what rewards that fail leave, shows at the first validation.
    """
    usual = {
        "val/accuracy": any(prompt.answer is not None for prompt in inputs.val.prompts),
        "val/reverse_kl": config.algorithm.needs_teacher,
        "val/loss": config.algorithm.is_supervised,
    }
    groups = ["reward"] * _is_rewarded(config) + [questions.name for questions in inputs.val_sets]
    require_figures(config.trainer, {name: 0.0 for name, is_there in usual.items() if is_there}, groups)
