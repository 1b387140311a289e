"""What is measured on held-out prompts. The engines are played by functions: what they answer is chosen here."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gkd.config import load
from gkd.driver.validation.final_scores import SetScores, write_scores
from gkd.driver.validation.held_out import Validation
from gkd.errors import RunFailed
from gkd.evaluation.comparison import read_all
from gkd.rewards.adapters import resolve
from gkd.rewards.completion import Completion
from gkd.types import Prompt, Sample, SampleRequest, ScoredSample, Scoring, TrainingSample
from tests.data.models import WORDS, word_tokenizer
from tests.samples import training_sample

TOKENIZER = word_tokenizer()
OWN = "tests.rewards.functions"


def prompts(*answers: str | None) -> list[Prompt]:
    return [
        Prompt(i, np.array([5], np.int32), "a", answer=answer, question=f"question of {answer}")
        for i, answer in enumerate(answers)
    ]


class Engines:
    """Answers prompt i with i + 1 words "a", and evaluates the run's rewards as a worker does."""

    def __init__(self, config: Any) -> None:
        self.config, self.calls, self.scored = config, [], []

    def submit(self, requests: Sequence[SampleRequest], order: int) -> Sequence[SampleRequest]:
        self.calls.append(requests)
        return requests

    def collect(self, requests: Sequence[SampleRequest], timeout_s: float) -> list[TrainingSample]:
        self.scored = [
            ScoredSample(
                Sample.single_turn(r, np.full(r.prompt.id + 1, 5, np.int32), np.zeros(r.prompt.id + 1), 0, "stop")
            )
            for r in requests
        ]
        return [self._numbers(scored.sample) for scored in self.scored]

    def _numbers(self, sample: Sample) -> TrainingSample:
        prompt, n = sample.request.prompt, len(sample.sampled_ids)
        completion = Completion(prompt.text, TOKENIZER.decode(sample.sampled_ids), prompt.answer, n, 8, False)
        rewards: dict[str, float | str] = {}
        for name in self.config.reward.functions if sample.request.scoring.rewards else []:
            try:
                rewards[name] = float(resolve(name, self.config.reward)(completion))
            except Exception as error:
                rewards[name] = repr(error)
        return training_sample(prompt_id=prompt.id, n_prompt=1, n=n, rewards=rewards)

    def fetch(self, samples: Sequence[TrainingSample]) -> list[ScoredSample]:
        return self.scored


def validated(held_out: list[Prompt], **settings: Any) -> tuple[dict[str, float], Engines]:
    validation, engines = made(held_out, **settings)
    return validation.run(), engines


def made(held_out: list[Prompt], **settings: Any) -> tuple[Validation, Engines]:
    algorithm = {"algorithm": {"name": "grpo"}, "rollout": {"n": 2}} if "reward" in settings else {}
    config = load({**algorithm, **settings})
    engines = Engines(config)
    inputs = SimpleNamespace(
        val=SimpleNamespace(prompts=held_out), tokenizer=TOKENIZER, model=SimpleNamespace(vocabulary=9)
    )
    return Validation(config, inputs, engines, SimpleNamespace(version=0), {}), engines  # type: ignore[arg-type]


def test_rewards_of_ones_own_are_measured_without_answers() -> None:
    functions = [f"{OWN}:words", "length"]
    metrics, engines = validated(prompts(None, None, None), reward={"functions": functions, "weights": [1.0, 8.0]})
    assert metrics == pytest.approx({"val/reward/words": 2.0, "val/reward/length": 0.75, "val/reward/mean": 8.0})
    (requests,) = engines.calls
    assert [request.sampling.temperature for request in requests] == [0.0] * 3
    assert [request.scoring for request in requests] == [Scoring(rewards=True)] * 3


def test_answers_of_other_weights_end_the_run() -> None:
    """Before anything is measured, whichever of the answers it is."""
    validation, _ = made(prompts("a", "b"))
    validation.actor.version = 3
    with pytest.raises(RunFailed, match=r"prompt 0, .*version 0\b.* 3$"):
        validation.run()


def test_accuracy_stays_beside_them_and_only_prompts_with_answers_are_compared() -> None:
    metrics, engines = validated(prompts("a", None, "b"), reward={"functions": ["accuracy", f"{OWN}:words"]})
    assert metrics == {"val/accuracy": 0.5, "val/reward/accuracy": 0.5, "val/reward/words": 2.0, "val/reward/mean": 2.5}
    assert [request.prompt.id for request in engines.calls[0]] == [0, 2]
    metrics, _ = validated(prompts("a", None, "b"), reward={"functions": [f"{OWN}:words"]})
    assert metrics == {"val/accuracy": 0.5, "val/reward/words": 2.0, "val/reward/mean": 2.0}


def test_scores_of_questions_are_kept_for_comparisons(tmp_path: Path) -> None:
    """By what is asked; a score that one question lacks, as of a reward that failed there, is that of the others."""
    functions = ["accuracy", f"{OWN}:words", f"{OWN}:raises"]
    validation, _ = made(prompts("a", "a", "b"), reward={"functions": functions, "max_failed_share": 1.0})
    metrics = validation.run()
    first, again, other = validation.scores
    assert [first, again, other] == ["question of a", "question of a-2", "question of b"]
    own = {"usual": {"a": {"accuracy": 0.5}, "b": {"accuracy": 1.0, "reward/judge": 0.75}}, "empty": {}}
    val_sets = [SetScores(name, 4, scores) for name, scores in own.items()]
    write_scores([SetScores("val", 1, validation.scores), *val_sets], tmp_path)
    usual, val = read_all([tmp_path])
    assert (usual.model, usual.set, usual.n, usual.samples) == (tmp_path.name, "usual", 2, 4)
    assert (usual.scores["accuracy"].value, usual.scores["reward/judge"].value) == (0.75, 0.75)
    assert {f"val/{name}": mean.value for name, mean in val.scores.items() if name != "accuracy"} | {
        "val/accuracy": val.scores["accuracy"].value
    } == {name: value for name, value in metrics.items() if not name.endswith(("/failed", "val/reward/mean"))}
    assert any("reward/raises" not in own for own in val.questions.values())
    assert [own["accuracy"] for own in val.questions.values()] == [1.0, 0.0, 0.0]


def test_what_failed_is_counted_and_left_out_of_the_means() -> None:
    reward = {"functions": [f"{OWN}:raises", f"{OWN}:words"], "max_failed_share": 0.5}
    metrics, _ = validated(prompts(None, None, None, None), reward=reward)
    assert metrics == {
        "val/reward/raises": 1.0, "val/reward/words": 2.5, "val/reward/raises/failed": 0.5, "val/reward/mean": 4.0
    }  # fmt: skip
    with pytest.raises(RunFailed, match=r"raises .*\b2 of 4\b.*reward\.max_failed_share=0\.4"):
        validated(prompts(None, None, None, None), reward={**reward, "max_failed_share": 0.4})


def test_without_rewards_answers_alone_are_measured() -> None:
    metrics, engines = validated(prompts("a", None))
    assert metrics == {"val/accuracy": 1.0}
    assert engines.calls[0][0].scoring == Scoring()
    assert validated(prompts(None))[0] == {}


def test_the_divergence_is_measured_with_a_k_of_its_own_whatever_is_trained_with() -> None:
    for name, training in (("on_policy_distill", {"loss": {"top_k": 2}}), ("grpo", {"advantage": {"teacher_kl": 0.1}})):
        reward = {"functions": ["accuracy"]} if name == "grpo" else {}
        config = load({"algorithm": {"name": name, **training}, "rollout": {"n": 2}, "reward": reward,
                       "data": {"val_top_k": 5}})  # fmt: skip
        engines, held_out = Engines(config), SimpleNamespace(prompts=prompts(None, None))
        inputs = SimpleNamespace(val=held_out, tokenizer=TOKENIZER, model=SimpleNamespace(vocabulary=9))
        actor = SimpleNamespace(evaluate=lambda samples: {"distill/reverse_kl": 0.5}, version=0)
        validation = Validation(config, inputs, engines, actor, {"teacher": None})  # type: ignore[arg-type, dict-item]
        assert validation.run()["val/reverse_kl"] == 0.5
        assert all(r.scoring == Scoring(5) and r.sampling.temperature == 1.0 for r in engines.calls[0])
        seeds = [r.seed for r in engines.calls[0]]
        n_calls = len(engines.calls)
        validation.run()
        assert len(set(seeds)) == 2 and [r.seed for r in engines.calls[n_calls]] == seeds  # at every validation


def test_replicas_are_watched_while_the_teacher_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only one, which dies meanwhile, answers once the watch has had it started again."""
    monkeypatch.setattr("gkd.driver.validation.held_out.POLL_EVERY_S", 0.05)
    answer: Future[Any] = Future()
    attended: list[float] = []

    def attend(wait_s: float) -> None:
        attended.append(wait_s)
        if len(attended) == 2:
            answer.set_result(np.array([5], np.int32))

    config = load({"data": {"val_limit": 1}})
    engines = SimpleNamespace(attend=attend, colocation=SimpleNamespace(wake_engines=lambda: None))
    held_out = SimpleNamespace(prompts=prompts("a"))
    inputs = SimpleNamespace(val=held_out, tokenizer=TOKENIZER, model=SimpleNamespace(vocabulary=9))
    teacher = SimpleNamespace(submit=lambda request: answer)
    validation = Validation(config, inputs, engines, None, {"teacher": teacher})  # type: ignore[arg-type, dict-item]
    assert validation.teacher() == {"val/accuracy": 1.0}
    assert set(attended) == {0.0}  # without waiting: answers are what is waited for


def test_the_teacher_may_take_any_time_while_answers_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """More in all than a batch has without anything sampled; then it is told how many are missing."""
    monkeypatch.setattr("gkd.driver.validation.held_out.POLL_EVERY_S", 0.2)
    answers = [Future[Any]() for _ in range(7)]
    left, futures = answers[:6], iter(answers)

    def attend(wait_s: float) -> None:
        if left:
            left.pop().set_result(np.array([5], np.int32))

    config = load({"data": {"val_limit": 7}, "rollout": {"timeout_s": 0.9}})
    engines = SimpleNamespace(attend=attend, colocation=SimpleNamespace(wake_engines=lambda: None))
    inputs = SimpleNamespace(
        val=SimpleNamespace(prompts=prompts(*"aaaaaaa")), tokenizer=TOKENIZER, model=SimpleNamespace(vocabulary=9)
    )
    teacher = SimpleNamespace(submit=lambda request: next(futures))
    validation = Validation(config, inputs, engines, None, {"teacher": teacher})  # type: ignore[arg-type, dict-item]
    with pytest.raises(RunFailed, match=r"\b1 of 7 .*0\.9 s"):
        validation.teacher()


def test_the_teachers_answer_ends_at_the_texts_that_end_the_students() -> None:
    """It is asked without them, and goes on to the next question."""
    answer: Future[Any] = Future()
    answer.set_result(np.array([WORDS.index(word) for word in "abc"], np.int32))
    config = load({"data": {"val_limit": 1}, "rollout": {"stop": ["b"]}})
    engines = SimpleNamespace(attend=lambda wait_s: None, colocation=SimpleNamespace(wake_engines=lambda: None))
    model = SimpleNamespace(vocabulary=9)
    inputs = SimpleNamespace(val=SimpleNamespace(prompts=prompts("a")), tokenizer=TOKENIZER, model=model)
    teacher = SimpleNamespace(submit=lambda request: answer)
    validation = Validation(config, inputs, engines, None, {"teacher": teacher})  # type: ignore[arg-type, dict-item]
    assert validation.teacher() == {"val/accuracy": 1.0}


@pytest.mark.parametrize(
    ("text", "teachers", "right"), [("7 <think>", "7", 1.0), ("7", "7 <think>", 0.0), ("7 <think>", None, 0.0)]
)
def test_the_teachers_answer_goes_on_where_its_own_prompt_ends(text: str, teachers: str | None, right: float) -> None:
    """A template may open the reasoning, in which an answer that is cut there states nothing; the student's may not."""
    words = ("<unk>", "<eos>", "<think>", "7")
    answer: Future[Any] = Future()
    answer.set_result(np.array([3], np.int32))
    seen = None if teachers is None else np.array([words.index(word) for word in teachers.split()], np.int32)
    asked = Prompt(0, np.array([3], np.int32), text, answer="7", teacher_ids=seen)
    engines = SimpleNamespace(attend=lambda wait_s: None, colocation=SimpleNamespace(wake_engines=lambda: None))
    model, held_out = SimpleNamespace(vocabulary=4), SimpleNamespace(prompts=[asked])
    inputs = SimpleNamespace(val=held_out, tokenizer=word_tokenizer(words), model=model)
    teacher = SimpleNamespace(submit=lambda request: answer)
    validation = Validation(load({}), inputs, engines, None, {"teacher": teacher})  # type: ignore[arg-type, dict-item]
    assert validation.teacher() == {"val/accuracy": right}


def test_answers_end_at_the_texts_that_end_responses_in_training() -> None:
    _, engines = validated(prompts("a"), rollout={"stop": ["b"]})
    assert [r.sampling.stop for requests in engines.calls for r in requests] == [("b",)]
