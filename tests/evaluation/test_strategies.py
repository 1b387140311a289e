"""The strategies that come with gkd, with a model that does as it is told."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gkd.config import load
from gkd.config.evaluation import _is_strategy
from gkd.config.registry import forget_edited
from gkd.evaluation.answering import answer_all
from gkd.evaluation.answers import RecordedAnswer
from gkd.evaluation.plan import measurements
from gkd.evaluation.questions import Question
from gkd.evaluation.retrieval import AdaptiveRetrieval, FixedRetrieval, Retrieval
from gkd.evaluation.self_consistency import SelfConsistency
from gkd.evaluation.strategies import Answer, Messages, Reply
from gkd.types import Sampling
from tests.evaluation.test_answering import jobs

DOCUMENTS = {"documents": ["rain", "the answer is 7", "sun"]}


class Model:
    """Replies with what ``says`` makes of the prompt and the number of the request."""

    in_flight = 1

    def __init__(self, says: Callable[[str, int], str], limit: int = 8) -> None:
        self.says, self.limit, self.prompts, self.temperatures = says, limit, list[str](), list[float]()

    async def reply(self, question: Question, prompt: str | Messages | None, sampling: Sampling, seed: int) -> Reply:
        self.prompts.append(str(prompt or question.prompt.text))
        self.temperatures.append(sampling.temperature)
        text = self.says(self.prompts[-1], len(self.prompts) - 1)
        return Reply(text, len(text.split()), len(text.split()) == self.limit)

    async def work(self) -> None:
        await asyncio.Event().wait()


async def strategy(generate: object, row: object, k: int = 1) -> Answer:
    return Answer("1")


@functools.wraps(strategy)
def decorated(*arguments: object) -> object:
    return strategy(*arguments)


class OfAClass:
    async def __call__(self, generate: object, row: object) -> Answer:
        return Answer("1")


def plain(generate: object, row: object) -> Answer:
    return Answer("1")


@pytest.mark.parametrize("one", [strategy, functools.partial(strategy, k=2), decorated, OfAClass, OfAClass()])
def test_whatever_is_awaited_with_ask_and_row_is_a_strategy(one: object) -> None:
    assert _is_strategy(one)


@pytest.mark.parametrize("name", ["function", "partial", "OfAClass", "an_object"])
def test_a_strategy_of_ones_own_is_known_by_the_file_that_names_it(name: str, tmp_path: Path) -> None:
    file, asked = tmp_path / "own.py", tmp_path / "asked.jsonl"
    file.write_text(
        "import functools\n\nfrom gkd.evaluation.strategies import Answer\n\n\n"
        "async def function(generate, row, k=1):\n    return Answer('1', 0)\n\n\n"
        "class OfAClass:\n    async def __call__(self, generate, row):\n        return Answer('1', 0)\n\n\n"
        "partial, an_object = functools.partial(function, k=2), OfAClass()\n"
    )
    asked.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    own_set = {"files": [str(asked)], "answer_key": "answer"}
    endpoint = {"url": "http://127.0.0.1/v1", "model": "a"}
    evaluate = {"strategies": [f"{file}:{name}"], "sets": {"sums": own_set}, "endpoints": {"a": endpoint}}
    config = load({"evaluate": evaluate})
    (before,) = measurements(config, False, print)
    assert before.identity.startswith(f"{name}@")
    file.write_text(file.read_text().replace("k=2", "k=3"))
    assert measurements(config, False, print)[0].identity == before.identity  # of the code that is loaded
    forget_edited()  # as of the next evaluation in this process
    (after,) = measurements(config, False, print)
    assert after.identity != before.identity


@pytest.mark.parametrize("one", [plain, Answer, object()])
def test_what_is_not_is_none(one: object) -> None:
    assert not _is_strategy(one)


def answered(
    model: Model, strategy: object, row: dict[str, object], opened: str = "", stop: tuple[str, ...] = ()
) -> Answer:
    (job,) = jobs(1)
    prompt = replace(job.question.prompt, text=job.question.prompt.text + opened)
    question = Question(job.question.key, prompt, row)
    answers: list[RecordedAnswer] = []
    to_answer = [type(job)(question, 0)]
    sampling = Sampling(8, stop=stop)
    answer_all(model, to_answer, strategy, sampling, 0, 60.0, lambda _, own: answers.append(own))
    return Answer(answers[0].text, answers[0].cost or 0, answers[0].iterations)


def reader(prompt: str, _: int) -> str:
    """Wants more passages until it has seen the answer."""
    return "7" if "answer is 7" in prompt else "MORE"


def test_adaptive_looks_until_the_model_answers() -> None:
    model = Model(reader)
    assert answered(model, AdaptiveRetrieval(Retrieval.Config(k=3)), DOCUMENTS) == Answer("7", 3, 3)
    assert "rain" not in model.prompts[0] and "[1] rain" in model.prompts[1] and "sun" not in model.prompts[2]
    assert answered(Model(lambda *_: "5"), AdaptiveRetrieval(Retrieval.Config()), DOCUMENTS) == Answer("5", 1, 1)


def test_adaptive_answers_after_k_steps_and_thinks_where_there_is_nothing_to_look_at() -> None:
    model = Model(lambda prompt, n: "9" if "or with MORE" not in prompt else f"MORE: thought {n}")
    assert answered(model, AdaptiveRetrieval(Retrieval.Config(k=2)), {}) == Answer("9", 7, 3)
    assert "[1] thought 0\n\n[2] thought 1" in model.prompts[2]


def test_fixed_k_takes_k_steps_whatever_the_model_says() -> None:
    model = Model(reader)
    answer = answered(model, FixedRetrieval(Retrieval.Config(k=2)), DOCUMENTS)
    assert (answer.text, answer.iterations, len(model.prompts)) == ("7", 3, 3)
    assert "sun" not in model.prompts[-1]
    with pytest.raises(Exception, match=r"FixedRetrieval .*question 1: ValueError: .*\bdocuments\b"):
        answered(model, FixedRetrieval(Retrieval.Config()), {"documents": "rain"})


def test_self_consistency_takes_what_most_samples_say() -> None:
    says = ["it is 3", "#### 4", "4.0", "5", "4"]
    model = Model(lambda _, n: says[n])
    assert answered(model, SelfConsistency(SelfConsistency.Config(k=5)), {}) == Answer("#### 4", 8, 5)
    assert model.temperatures == [0.7] * 5
    assert answered(Model(lambda *_: ""), SelfConsistency(SelfConsistency.Config(k=2)), {}).text == ""


@pytest.mark.parametrize("opened", ["", "<think>\n"])
def test_what_a_model_thinks_is_not_what_it_says(opened: str) -> None:
    """Where the reply begins its reasoning, and where the prompt's template does."""
    own = "" if opened else "<think>"
    says = [f"{own}so it is 3", f"{own}3 or 4</think>5", f"{own}so it is 3"]  # the first and the last are cut
    model = Model(lambda _, n: says[n], limit=4)
    assert answered(model, SelfConsistency(SelfConsistency.Config(k=3)), {}, opened).text == says[1]
    model = Model(lambda prompt, _: f"{own}hm</think>\n{reader(prompt, 0)}")
    assert answered(model, AdaptiveRetrieval(Retrieval.Config(k=3)), DOCUMENTS, opened).iterations == 3
    model = Model(lambda _, n: f"{own}hm</think>note {n}")
    answered(model, FixedRetrieval(Retrieval.Config(k=1)), {}, opened)
    assert "note 0" in model.prompts[-1] and "hm" not in model.prompts[-1]


def test_a_text_that_ended_a_reply_is_no_part_of_what_it_says() -> None:
    """Engines leave it there: on its own line it would be what all samples agree on."""
    says = ["5\nQ:", "7\nQ:", "7\nQ:"]
    strategy = SelfConsistency(SelfConsistency.Config(k=3))
    assert answered(Model(lambda _, n: says[n]), strategy, {}, stop=("Q:",)).text == says[1]
    model = Model(lambda _, n: f"note {n} Q:")
    answered(model, FixedRetrieval(Retrieval.Config(k=1)), {}, stop=("Q:",))
    assert "note 0" in model.prompts[-1] and "Q:" not in model.prompts[-1]
