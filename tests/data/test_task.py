"""Tasks, which make the models and data of a run: which one a run has, and users' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gkd.config import Config, load
from gkd.config.compose import compose
from gkd.data.task import make_inputs, task_of
from gkd.errors import ConfigError, RunFailed
from gkd.planning.layout import models_of
from gkd.recipes.sort_digits.task import SortDigits

OWN = Path(__file__).parents[1] / "own" / "fixed_task.py"


def test_a_run_without_a_model_sorts_digits() -> None:
    config = compose(["+recipe=grpo", "data.sort_digits.digits=5"])
    assert config.data.task == "sort_digits"
    assert config.trainer.batch_size == 32  # conf/task/sort_digits_rewards.yaml
    task = task_of(config)
    assert isinstance(task, SortDigits)
    assert task.digits == 5


def test_a_task_in_a_users_file(tmp_path: Path) -> None:
    config = compose(["+recipe=grpo", f"data.task={OWN}:Fixed", f"data.Fixed.directory={tmp_path}"])
    assert config.trainer.batch_size == 64  # the settings of the sorting task are not composed in
    inputs = task_of(config).make(lambda _: None)
    assert (inputs.student, inputs.teacher) == (f"{tmp_path}/student", None)
    assert inputs.val_files == [f"{tmp_path}/val.jsonl"]


@pytest.mark.parametrize(("recipe", "n_prompts"), [("on_policy_distill", 64), ("sft", 64), ("grpo", 32)])
def test_a_task_states_which_settings_suit_it(recipe: str, n_prompts: int, tmp_path: Path) -> None:
    file = tmp_path / "sorting.py"
    file.write_text(
        "from gkd.recipes.sort_digits.task import SortDigits\n\n\n"
        "class Sorting(SortDigits):\n    reward_settings = 'sort_digits_rewards'\n    token_settings = None\n"
    )
    config = compose([f"+recipe={recipe}", f"data.task={file}:Sorting"])
    assert config.trainer.batch_size == n_prompts
    assert config.rollout.max_response_length == (12 if recipe == "grpo" else Config().rollout.max_response_length)


def test_a_users_task_is_planned_by_its_models(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    shape = LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=2, vocab_size=99)
    shape.save_pretrained(tmp_path / "student")
    config = compose(["+recipe=grpo", f"data.task={OWN}:Fixed", f"data.Fixed.directory={tmp_path}"])
    student = models_of(config).student
    assert (student.n_layers, student.hidden, student.vocabulary) == (3, 64, 99)
    taught = compose(["+recipe=on_policy_distill", f"data.task={OWN}:Fixed", f"data.Fixed.directory={tmp_path}"])
    with pytest.raises(ConfigError, match=r"algorithm\.name=on_policy_distill"):
        models_of(taught)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"data": {"task": "sort_digit"}}, r"data\.task=sort_digit: .*mean sort_digits\?"),
        ({"data": {"task": f"{OWN}:Fixed"}}, r"data\.Fixed\.directory.*[Ff]ield required"),
        ({"data": {"task": f"{OWN}:Path"}}, "make and model_configs"),
        ({"data": {"task": "sort_digits"}, "model": {"path": "x"}}, r"data\.task=null"),
        ({"builtin": {"digits": 3}}, r"builtin\.digits \(here: data\.sort_digits\.digits\)"),
    ],
)
def test_what_is_no_task_is_refused(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tree)


def test_a_run_without_a_model_and_a_task_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.path, .*data\.task .*sort_digits"):
        task_of(load({}))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("return {'student': 'x'}", "makes dict: .*TaskInputs"),
        ("raise KeyError('shape')", r"KeyError: 'shape' .*mine\.py, line 3\)"),
        ("open('/no/such/model')", r"FileNotFoundError: .*mine\.py, line 3\)"),
        ("raise SystemExit(0)", "SystemExit: "),
    ],
)
def test_a_users_task_that_makes_nothing_is_named(code: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    methods = f"    def make(self, report):\n        {code}\n    def model_configs(self): return {{}}\n"
    file.write_text(f"class Mine:\n{methods}    def __init__(self, config): pass\n")
    with pytest.raises(RunFailed, match=rf"data\.task=.*mine\.py:Mine.*{message}"):
        make_inputs(compose(["+recipe=grpo", f"data.task={file}:Mine"]), lambda _: None)
