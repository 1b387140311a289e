"""What each reward is worth, and that one that raises or hangs costs its own sample only."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import pytest

from gkd.config import Reward, load
from gkd.errors import ConfigError
from gkd.rewards.adapters import resolve
from gkd.rewards.completion import Completion, up_to_stop, without_stop

MODULE = "tests.rewards.functions"


def make_completion(response: str, answer: str | None = "#### 4", n: int = 5, limit: int = 10) -> Completion:
    return Completion("2 + 2 =", response, answer, n, limit, n == limit)


def value(name: str, completion: Completion, **options: object) -> float:
    settings = Reward.model_validate({"functions": [name], **({name: options} if options else {})})
    return resolve(name, settings)(completion)


def configured(name: str, **settings: object) -> Reward:
    """As a run's configuration has it."""
    reward = {"functions": [name], **settings}
    return load({"algorithm": {"name": "grpo"}, "rollout": {"n": 2}, "reward": reward}).reward


def test_rewards_with_one_last_name_are_told_apart_by_file_or_module_in_metrics(tmp_path: Path) -> None:
    def labels(*names: str) -> list[str]:
        for name in names:
            if ".py:" in name:
                file = Path(name.rpartition(":")[0])
                file.parent.mkdir(exist_ok=True)
                file.write_text("def score(completion): return 1.0\ndef mean(completion): return 1.0\n")
        return list(Reward.model_validate({"functions": list(names)}).labels().values())

    one, two, other = (f"{tmp_path}/{place}" for place in ("one.py", "two.py", "sub/one.py"))
    assert labels(f"{one}:score", "accuracy", f"{one}:mean") == ["score", "accuracy", "one.py:mean"]
    assert labels(f"{one}:score", f"{two}:score") == ["one.py:score", "two.py:score"]
    whole = f"{tmp_path}/".lstrip("/")
    assert labels(f"{one}:score", f"{other}:score") == [f"{whole}one.py:score", f"{whole}sub/one.py:score"]


def test_accuracy() -> None:
    assert value("accuracy", make_completion("so it is #### 4")) == 1.0
    assert value("accuracy", make_completion("so it is #### 5")) == 0.0
    with pytest.raises(ValueError, match="reference answer"):
        value("accuracy", make_completion("4", answer=None))


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("3 million", "3000000", 1.0),
        ("3 hundred million", "300,000,000", 1.0),
        ("3 hundred million", "3 million", 0.0),
        ("$3 hundred thousand", "300000", 1.0),
    ],
)
def test_numbers_in_words(response: str, answer: str, right: float) -> None:
    assert value("accuracy", make_completion(f"#### {response}", answer=answer)) == right


def test_a_response_that_is_cut_in_reasoning_which_its_prompt_began_has_no_answer() -> None:
    """As templates of models that always think end with <think>."""
    for response, right in (("so \\boxed{4}", 0.0), ("so 5</think>\\boxed{4}", 1.0), ("so 4</think>", 0.0)):
        completion = Completion("<|user|>2 + 2 =<|assistant|><think>\n", response, "4", 5, 10, False)
        assert value("accuracy", completion) == right


def test_format() -> None:
    assert value("format", make_completion("<think>a\nb</think> <answer>4</answer>")) == 1.0
    assert value("format", make_completion("<answer>4</answer>")) == 0.0
    assert value("format", make_completion("so #### 4"), pattern=r"####\s*\d") == 1.0


def test_the_form_of_a_response_whose_prompt_began_its_reasoning() -> None:
    """It could never have the default form."""
    for prompt, right in (("<|assistant|><think>\n", 1.0), ("<|assistant|>", 0.0)):
        completion = Completion(prompt, "a</think> <answer>4</answer>", "4", 5, 10, False)
        assert value("format", completion) == right


def test_reasoning_steps() -> None:
    assert value("reasoning_steps", make_completion("Step 1: a\nStep 2: b\n3. c\n- d")) == 1.0
    assert value("reasoning_steps", make_completion("First, a\nso b")) == pytest.approx(1 / 3)
    assert value("reasoning_steps", make_completion("1. a\n2) b"), n_steps=4) == 0.5
    began = time.process_time()
    assert value("reasoning_steps", make_completion(" 1. a\n\n\t- b\n" + "\n" * 9_000), n_steps=4) == 0.5
    assert time.process_time() - began < 1.0


def test_programs_have_less_time_than_their_reward() -> None:
    """One that hangs would be a sample without a reward, and not one with 0."""
    assert configured("code", timeout_s=7.0).settings_of("code").timeout_s == 6.0
    for settings in ({"timeout_s": 5.0}, {"code": {"timeout_s": 10.0}}):
        with pytest.raises(ConfigError, match=r"^reward\.code\.timeout_s=\d+ .* reward\.timeout_s="):
            configured("code", **settings)
    assert configured("format", timeout_s=1.0).timeout_s == 1.0


@pytest.mark.parametrize(("n", "right", "wrong"), [(0, 1.0, -1.0), (5, 0.75, -0.75), (10, 0.5, -0.5)])
def test_cosine_goes_from_its_first_value_to_its_second(n: int, right: float, wrong: float) -> None:
    assert value("cosine", make_completion("#### 4", n=n)) == pytest.approx(right)
    assert value("cosine", make_completion("#### 5", n=n)) == pytest.approx(wrong)
    assert value("cosine", make_completion("#### 4", n=2)) == pytest.approx(0.5 + 0.5 * (1 + math.cos(math.pi / 5)) / 2)


def test_repetition_penalty() -> None:
    assert value("repetition_penalty", make_completion("a b c d e")) == 0.0
    assert value("repetition_penalty", make_completion("a b c a b c")) == pytest.approx(-1 / 4)
    assert value("repetition_penalty", make_completion("a a a a"), n=1, largest=0.5) == pytest.approx(-0.5 * 3 / 4)
    assert value("repetition_penalty", make_completion("a b")) == 0.0


def test_length() -> None:
    assert value("length", make_completion("", n=4)) == pytest.approx(0.6)
    assert [value("length", make_completion("", n=n), target_length=4) for n in (0, 2, 4, 8, 10)] == [
        0.0,
        0.5,
        1.0,
        0.0,
        0.0,
    ]


def test_the_recipes_reward_of_a_length_also_takes_an_empty_answer() -> None:
    """As of an endpoint, or of a strategy."""
    name = f"{Path(__file__).parents[2]}/recipes/your_own/reward.py:Brevity"
    rewards = [resolve(name, configured(name))(make_completion("", n=n)) for n in (0, 16, 32)]
    assert rewards == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(("name", "options"), [("length", {}), ("length", {"target_length": 4}), ("cosine", {})])
def test_a_length_that_is_not_known_gives_no_reward(name: str, options: dict[str, object]) -> None:
    """Of an endpoint that does not count tokens; what is not finite counts as failed."""
    completion = Completion("2 + 2 =", "#### 4", "4", math.nan, 10, False)
    assert math.isnan(value(name, completion, **options))


@pytest.mark.parametrize(
    ("text", "stops", "answer"),
    [
        ("Paris\n\nQuestion: ", ("Answer:", "\n\nQuestion:"), "Paris"),
        ("first reply\n\nParis\n\n", ("\n\n",), "first reply\n\nParis"),
        ("first reply\n\nParis", ("\n\n",), "first reply\n\nParis"),
        ("Paris\n\nQuestion:", (), "Paris\n\nQuestion:"),
        ("so <answer>Paris</answer>", ("</answer>",), "so <answer>Paris</answer>"),
        ("```py\n1\n```", ("```",), "```py\n1\n```"),
        ("Paris", ("Question:",), "Paris"),
    ],
)
def test_the_text_that_ends_an_answer_is_no_part_of_it_unless_it_closes_something(
    text: str, stops: tuple[str, ...], answer: str
) -> None:
    assert without_stop(text, stops) == answer


@pytest.mark.parametrize(
    ("reply", "stops", "kept"),
    [
        ('Paris."', (".",), "Paris."),
        ("Paris\nQuestion", ("Answer", "\nQ"), "Paris\nQ"),
        ("a</answer>\n", ("\n", "</answer>"), "a</answer>"),
        ("Paris", ("Question:",), "Paris"),
        ("Paris", (), "Paris"),
    ],
)
def test_a_reply_ends_with_the_text_that_ends_it(reply: str, stops: tuple[str, ...], kept: str) -> None:
    """Whose token may have more, such as what closes a quotation."""
    assert up_to_stop(reply, stops) == kept


def test_a_users_function() -> None:
    assert resolve(f"{MODULE}:words", Reward())(make_completion("one two")) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:reward", "nowhere:reward .*: ModuleNotFoundError: .*'nowhere'"),
        (f"{MODULE}:missing", f": {MODULE} .*missing"),
        ("tests.rewards.ends:reward", ": SystemExit"),
        (f"{MODULE}:CONSTANT", "no function.* int"),
        (f"{MODULE}:takes_nothing", "takes_nothing: .*arguments"),
        (f"{MODULE}:TakesSettings", "TakesSettings: .*'config'"),
    ],
)
def test_what_is_no_reward(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(name)


def test_a_users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative to where the program was started, beside another of the same name, and with what lies beside it."""
    for folder, factor in (("a", 2), ("b-c", 3)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my_reward.py").write_text(
            "from dataclasses import dataclass\n"
            f"from factor_{factor} import FACTOR\n"
            "@dataclass\nclass Found:\n    n: 'int'\n"
            "def words(completion):\n    return Found(len(completion.response.split())).n * FACTOR\n"
        )
        (tmp_path / folder / f"factor_{factor}.py").write_text(f"FACTOR = {factor}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = ["a/my_reward.py:words", f"{tmp_path}/b-c/my_reward.py:words"]
    reward = Reward(functions=names)
    assert reward.functions == [f"{tmp_path}/a/my_reward.py:words", names[1]]
    monkeypatch.chdir("/")
    assert [resolve(name, reward)(make_completion("one two")) for name in reward.functions] == [4, 6]


OWN_CLASS = """
from pydantic import BaseModel
class Brevity:
    class Config(BaseModel):
        limit: int = 10
    needs_answer = {needs_answer}
    def __init__(self, config):
        self.config = config
    def __call__(self, completion):
        return float(completion.n_tokens <= self.config.limit)
"""


def test_a_users_class_has_settings_and_properties_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN_CLASS.format(needs_answer=False))
    name = f"{file}:Brevity"
    reward = configured(name, Brevity={"limit": 4})
    assert [resolve(name, reward)(make_completion("x", n=n)) for n in (4, 5)] == [1.0, 0.0]
    assert configured(name).model_dump()["Brevity"] == {"limit": 10}  # as config.yaml has it
    for section, message in (
        ({"limit": "long"}, r"reward\.Brevity\.limit=long: "),
        ({"limt": 4}, r"unknown setting reward\.Brevity\.limt \(did you mean reward\.Brevity\.limit\?\)"),
        (4, r"reward\.Brevity=4: a section with the settings of Brevity is expected"),
    ):
        with pytest.raises(ConfigError, match=message):
            configured(name, Brevity=section)
    with pytest.raises(ConfigError, match=r"setting reward\.Brevity\.limit"):
        configured("length", Brevity={"limit": 4})
    needy = tmp_path / "needy.py"
    needy.write_text(OWN_CLASS.format(needs_answer=True))
    assert configured(f"{needy}:Brevity").functions_needing_answers() == [f"{needy}:Brevity"]
    assert configured(name).functions_needing_answers() == []


def test_two_classes_do_not_share_a_section_of_settings(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN_CLASS.format(needs_answer=False).replace("Brevity", "format") + "\ntimeout_s = format\n")
    with pytest.raises(ConfigError, match=r"format .*other settings"):
        configured("format", functions=["format", f"{file}:format"])
    with pytest.raises(ConfigError, match=r"timeout_s .*other settings"):
        configured(f"{file}:timeout_s")


def test_a_file_that_came_with_a_job_is_this_machines_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray unpacks a job's files on every node in a directory of one name, which differ in where they are."""
    (tmp_path / "here" / "_ray_pkg_1f" / "sub").mkdir(parents=True)
    (tmp_path / "here" / "_ray_pkg_1f" / "sub" / "own.py").write_text("def words(completion):\n    return 7\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path / "here" / "_ray_pkg_1f")
    assert resolve(f"{tmp_path}/there/_ray_pkg_1f/sub/own.py:words", Reward())(make_completion("x")) == 7
    with pytest.raises(ConfigError, match=r"no file .*/there/_ray_pkg_2e/sub/own\.py"):
        resolve(f"{tmp_path}/there/_ray_pkg_2e/sub/own.py:words", Reward())


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (None, "words", "my_reward.py:words: .*no file /.*/my_reward.py"),
        ("def words(:", "words", ": SyntaxError: "),
        ("1 / 0", "words", ": ZeroDivisionError: "),
        ("import nowhere_at_all", "words", ": ModuleNotFoundError: "),
        ("raise SystemExit(3)", "words", ": SystemExit: "),
        ("x = 1", "words", r"\.py .*words"),
        ("words = 1", "words", "no function.* int"),
        ("x = 1", "", ":NAME"),
    ],
)
def test_a_file_that_holds_no_reward(text: str | None, name: str, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "my_reward.py").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        configured(f"{tmp_path}/my_reward.py:{name}")
    assert "\n" not in str(caught.value)
