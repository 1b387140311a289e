"""val/NAME/*: the student on the sets of ``data.val_sets``, each as often and sampled as its own settings have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gkd.actor.group import ActorGroup
from gkd.algorithms.training_samples import require_measured
from gkd.config import Config
from gkd.driver.validation.final_scores import SetScores
from gkd.evaluation.answering import seed_in_set
from gkd.evaluation.answers import RecordedAnswer
from gkd.evaluation.questions import Question, Questions, sampling_of
from gkd.evaluation.rating import score
from gkd.evaluation.scores import RatedAnswer, group_by_difficulty, means
from gkd.rewards.completion import up_to_stop, without_stop
from gkd.rollout.group import RolloutGroup
from gkd.types import Sample, SampleRequest, TrainingSample

RequestedSets = list[tuple[Questions, list[int]]]
"""Sets whose answers are requested, with the keys of these."""

NOT_SHOWN = ("cost", "iterations", "avg@")
"""How scores begin of strategies, which validation has none of, and of what is the accuracy."""
SPLIT = ("accuracy", "reward/")
"""How scores begin that are shown of each difficulty as well."""
SEED = 1  # the same at every validation, so that curves are comparable


@dataclass(frozen=True, slots=True)
class ValSets:
    """Measures the student on sets of questions."""

    config: Config
    sets: Sequence[Questions]
    tokenizer: Any
    rollout: RolloutGroup
    actor: ActorGroup
    last_scores: dict[str, SetScores] = field(default_factory=dict)
    """By set."""

    def run(self, sets: Sequence[Questions]) -> dict[str, float]:
        """Measure it on some of the sets."""
        return self.measure(self.request(sets))

    def select_due_sets(self, step: int, rest: bool = False) -> list[Questions]:
        """Return the sets that are asked at ``step``, all of them at step 0 and at the end; or the ``rest``."""
        every, last = self.config.trainer.val_every, step == self.config.trainer.total_steps
        due = [last or step % (questions.settings.every or every) == 0 for questions in self.sets]
        return [questions for questions, is_due in zip(self.sets, due, strict=True) if is_due != rest]

    def request(self, sets: Sequence[Questions], order: float = 0) -> RequestedSets:
        """Request answers from the weights that the engines have now."""
        return [(questions, self.rollout.submit(self._requests(questions), order)) for questions in sets]

    def measure(self, requested: RequestedSets) -> dict[str, float]:
        """Wait for the answers and measure. Raises RunFailed for an answer of other weights than the actor has."""
        limit = self.config.rollout.timeout_s
        sampled = [(questions, self.rollout.collect(keys, limit)) for questions, keys in requested]
        require_measured([sample for _, samples in sampled for sample in samples], self.actor.version)
        return {name: value for of_set in sampled for name, value in self._measure(*of_set).items()}

    def _requests(self, questions: Questions) -> list[SampleRequest]:
        sampling = sampling_of(self.config.rollout, questions.settings)
        return [SampleRequest(q.prompt, i, seed_in_set(SEED, q.key, i), sampling) for q, i in _jobs(questions)]

    def _measure(self, questions: Questions, samples: Sequence[TrainingSample]) -> dict[str, float]:
        fetched = zip(_jobs(questions), self.rollout.fetch(samples), samples, strict=True)
        rated = [
            self._make_rated_answer(questions, q, scored_sample.sample, sample.version)
            for (q, _), scored_sample, sample in fetched
        ]
        values = score(self.config, questions, rated, self._attend)
        groups, name = group_by_difficulty(questions.questions, values), questions.name
        self.last_scores[name] = SetScores(name, questions.settings.samples, values, groups)
        return _metrics(name, list(values.values())) | _metrics_by_difficulty(name, groups)

    def _attend(self) -> None:
        self.rollout.attend(wait_s=0.0)  # what is sampled ahead goes on beside a slow judge

    def _make_rated_answer(self, questions: Questions, question: Question, sample: Sample, version: int) -> RatedAnswer:
        """Return what is scored of a sample that was drawn from weights of ``version``."""
        sampling, ids = sampling_of(self.config.rollout, questions.settings), sample.sampled_ids.tolist()
        reply = up_to_stop(self.tokenizer.decode(ids, skip_special_tokens=True), sampling.stop)
        text, truncated = without_stop(reply, sampling.stop), sample.finish_reason == "length"
        answered, steps = RecordedAnswer(text, len(ids), 1, len(ids), truncated, 0.0), self.config.trainer.total_steps
        return RatedAnswer(question, answered, sampling.max_tokens, tuple(ids), version, steps)


def _jobs(questions: Questions) -> list[tuple[Question, int]]:
    """Return what is asked of a set: each question, with the number of the answer."""
    return [(question, index) for question in questions.questions for index in range(questions.settings.samples)]


def _metrics(name: str, values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return val/NAME/SCORE of a set, and the standard error of its accuracy over questions."""
    scores = {score: mean for score, mean in means(values).items() if not score.startswith(NOT_SHOWN)}
    row = {f"val/{name}/{score}": mean.value for score, mean in scores.items()}
    accuracy = scores.get("accuracy")
    if accuracy is not None and accuracy.stderr is not None:
        row[f"val/{name}/stderr"] = accuracy.stderr
    return row


def _metrics_by_difficulty(name: str, groups: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return val/NAME/difficulty/VALUE/SCORE: accuracy and rewards of the questions of each difficulty."""
    return {
        f"val/{name}/difficulty/{difficulty}/{score}": mean["value"]
        for difficulty, group in groups.items()
        for score, mean in group["scores"].items()
        if score.startswith(SPLIT)
    }
