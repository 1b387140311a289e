"""What is measured on held-out prompts. The engines are played by functions: what they answer is chosen here."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gkd.config import load
from gkd.driver.validation import Validation
from gkd.errors import RunFailed
from gkd.rewards.completion import Completion, resolve
from gkd.types import Judging, Prompt, Record, Request, Sample, Scored
from tests.data.models import word_tokenizer

TOKENIZER = word_tokenizer()
OWN = "tests.rewards.functions"


def prompts(*answers: str | None) -> list[Prompt]:
    return [Prompt(i, np.array([5], np.int32), "a", answer=answer) for i, answer in enumerate(answers)]


class Engines:
    """Answers prompt i with i + 1 words "a", and evaluates the run's rewards as a worker does."""

    def __init__(self, config: Any) -> None:
        self.config, self.asked, self.scored = config, [], []

    def sample(self, requests: Sequence[Request], judging: Judging, timeout_s: float) -> list[Record]:
        self.asked.append((requests, judging))
        self.scored = [
            Scored(Sample(r, np.full(r.prompt.id + 1, 5, np.int32), np.zeros(r.prompt.id + 1), 0, "stop"), None)
            for r in requests
        ]
        return [self._record(scored.sample, judging) for scored in self.scored]

    def _record(self, sample: Sample, judging: Judging) -> Record:
        prompt, n = sample.request.prompt, len(sample.response_ids)
        judged = Completion(prompt.text, TOKENIZER.decode(sample.response_ids), prompt.answer, n, 8, False)
        given: dict[str, float | str] = {}
        for name in self.config.reward.functions if judging.rewards else []:
            try:
                given[name] = float(resolve(name, self.config.reward)(judged))
            except Exception as error:
                given[name] = repr(error)
        return Record(0, prompt.id, 0, given, 1, n, "stop", 0, 0, 0.0, 0.0, 0)

    def fetch(self, records: Sequence[Record]) -> list[Scored]:
        return self.scored


def validated(held_out: list[Prompt], **settings: Any) -> tuple[dict[str, float], Engines]:
    algorithm = {"algorithm": {"name": "grpo"}, "rollout": {"n": 2}} if "reward" in settings else {}
    config = load({**algorithm, **settings})
    engines = Engines(config)
    inputs = SimpleNamespace(
        val=SimpleNamespace(prompts=held_out), tokenizer=TOKENIZER, model=SimpleNamespace(vocabulary=9)
    )
    return Validation(config, inputs, engines, None, {}).run(), engines  # type: ignore[arg-type]


def test_rewards_of_ones_own_are_measured_without_answers() -> None:
    functions = [f"{OWN}:words", "length"]
    found, engines = validated(prompts(None, None, None), reward={"functions": functions, "weights": [1.0, 8.0]})
    assert found == pytest.approx({"val/reward/words": 2.0, "val/reward/length": 0.75, "val/reward/mean": 8.0})
    ((requests, judging),) = engines.asked
    assert [request.sampling.temperature for request in requests] == [0.0] * 3
    assert judging == Judging(rewards=True)


def test_accuracy_stays_beside_them_and_only_prompts_with_answers_are_compared() -> None:
    found, engines = validated(prompts("a", None, "b"), reward={"functions": ["accuracy", f"{OWN}:words"]})
    assert found == {"val/accuracy": 0.5, "val/reward/accuracy": 0.5, "val/reward/words": 2.0, "val/reward/mean": 2.5}
    assert [request.prompt.id for request in engines.asked[0][0]] == [0, 2]
    found, _ = validated(prompts("a", None, "b"), reward={"functions": [f"{OWN}:words"]})
    assert found == {"val/accuracy": 0.5, "val/reward/words": 2.0, "val/reward/mean": 2.0}


def test_what_failed_is_counted_and_left_out_of_the_means() -> None:
    reward = {"functions": [f"{OWN}:raises", f"{OWN}:words"], "max_failed_share": 0.5}
    found, _ = validated(prompts(None, None, None, None), reward=reward)
    assert found == {
        "val/reward/raises": 1.0, "val/reward/words": 2.5, "val/reward/raises/failed": 0.5, "val/reward/mean": 4.0
    }  # fmt: skip
    with pytest.raises(RunFailed, match=r"raises failed on 2 of 4 samples.*reward\.max_failed_share=0\.4"):
        validated(prompts(None, None, None, None), reward={**reward, "max_failed_share": 0.4})


def test_without_rewards_answers_alone_are_measured() -> None:
    found, engines = validated(prompts("a", None))
    assert found == {"val/accuracy": 1.0}
    assert engines.asked[0][1] == Judging()
    assert validated(prompts(None))[0] == {}
