"""Settings given as Python values are those of the command line."""

from __future__ import annotations

import ast
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import gkd
from gkd import evaluate, plan, train
from gkd.cli.train import _describe_end
from gkd.config.compose import compose
from gkd.config.overrides import overrides_of, shell_override
from gkd.errors import ConfigError, RunFailed, SignalExit
from tests.docs.pages import ROOT, python_files

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1)


def test_functions_keep_their_names_beside_programs_of_the_same_name() -> None:
    import gkd.evaluate
    import gkd.plan

    assert gkd.plan is plan and gkd.evaluate is evaluate
    assert callable(sys.modules["gkd.plan"].run)


@given(st.one_of(TEXT, st.text("\\'\"{}[]$:,= ", min_size=1)))
@hypothesis_settings(max_examples=60)
def test_every_text_arrives_as_it_is(text: str) -> None:
    if "${" in text:
        return  # an interpolation, here as there
    tree = {"recipe": "grpo", "reward": {"functions": ["format"], "format": {"pattern": "x"}}, "data.prompt_key": text}
    assert compose(overrides_of(tree)).data.prompt_key == text


def test_values_of_all_kinds() -> None:
    settings: dict[str, Any] = {
        "recipe": "grpo",
        "placement": "cpu",
        "actor": {"lr": 1e-5, "lora": {"r": 4}},
        "trainer.val_every": 7,
        "rollout.n": 3,
        "algorithm.importance_sampling.level": None,
        "trainer.resume": False,
        "trainer.output_dir": Path("/a b/c"),
        "watch.distill_kl": (0, 2.5),
        "model.path": "m",
        "data.answer_key": "answer",
        "data": {
            "train_files": ["a,b.jsonl", "it's.jsonl"],
            "val_files": ["v.jsonl"],
            "chat_template_kwargs": {"x": True},
        },
    }
    config = compose(overrides_of(settings))
    assert (config.actor.lr, config.actor.lora.r, config.trainer.val_every, config.rollout.n) == (1e-5, 4, 7, 3)
    assert config.algorithm.importance_sampling.level is None and config.trainer.resume is False
    assert config.trainer.output_dir == "/a b/c" and config.watch.distill_kl == [0, 2.5]
    assert config.data.train_files == ["a,b.jsonl", "it's.jsonl"]
    assert config.data.chat_template_kwargs == {"x": True}
    numbers = {"actor.lr": np.logspace(-6, -5, 2)[0], "rollout.n": np.int64(3), "rollout.top_p": np.float32(0.5)}
    config = compose(overrides_of({"recipe": "grpo", **numbers}))
    assert (config.actor.lr, config.rollout.n, config.rollout.top_p) == (pytest.approx(1e-6), 3, 0.5)


@pytest.mark.parametrize(
    "path", ["runs/a-1/model", "runs/actor.lr=1e-5,data.system_prompt=it's/model", "a b/$x", "ü/model"]
)
def test_a_path_that_is_shown_can_be_pasted_into_a_shell(path: str) -> None:
    (override,) = shlex.split(shell_override("trainer.output_dir", path))
    assert compose(["+recipe=grpo", override]).trainer.output_dir == path
    assert (override == f"trainer.output_dir={path}") == (path == "runs/a-1/model")


def test_the_settings_that_a_stopped_run_goes_on_with_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    output = tmp_path / "trainer.seed=0"
    (output / "checkpoints").mkdir(parents=True)
    (output / "checkpoints" / "latest").write_text("step_3")
    settings = shlex.split(_describe_end(compose([]), output).partition("(")[2])[:2]
    assert compose(["+recipe=grpo", *settings]).trainer.output_dir == str(output)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize(
    ("program", "starts"), [(train, "gkd.cli.train.run"), (evaluate, "gkd.evaluation.run.evaluate")]
)
def test_signals_that_a_program_does_not_handle_end_a_run_in_order(
    program: Callable[..., Any], starts: str, number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> None:
        assert signal.getsignal(number) is not signal.SIG_DFL  # which would end the tests
        signal.raise_signal(number)
        raise RunFailed

    own: list[int] = []
    settings = {"recipe": "grpo"} if program is train else {"models.a": ".", "evaluate.sets.x.files": ["x"]}
    monkeypatch.setattr(starts, run)
    before = signal.signal(number, signal.SIG_DFL)  # the tests' own process may handle it
    try:
        with pytest.raises(SignalExit) as end:
            program(settings)
        assert end.value.code == code and signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, lambda number, _: own.append(number))
        with pytest.raises(RunFailed):
            program(settings)
    finally:
        signal.signal(number, before)
    assert own == [number]


def test_an_async_callback_is_refused() -> None:
    async def on_step(step: int, metrics: dict[str, float]) -> None: ...

    with pytest.raises(ConfigError, match="on_step is async"):
        train({"recipe": "grpo"}, on_step=on_step)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "grpo", "actor.lr": object()}, r"actor\.lr=<object "),
        ({"recipe": "gpo"}, r"recipe=gpo: .*grpo"),
        ({"actor": {"learning_rate": 1.0}}, r"actor\.learning_rate.*actor\.lr"),
    ],
)
def test_bad_settings_are_those_of_the_command_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(settings)


def test_a_plan_is_returned(capfd: pytest.CaptureFixture[str]) -> None:
    report = plan({"recipe": "grpo", "model.size": "7b", "plan.gpu_type": "h100-80gb", "placement": "8gpu"})
    assert [group.group for group in report.memory][:2] == ["actor", "rollout"]
    assert report.steps and capfd.readouterr().out == ""


def test_the_settings_of_the_page_are_accepted() -> None:
    ((_, code),) = python_files(ROOT / "docs" / "python.md")
    (node,) = (
        n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Assign) and ast.unparse(n.targets) == "settings"
    )
    config = compose(overrides_of(ast.literal_eval(node.value)))
    assert (config.actor.lr, config.actor.lora.r, config.data.train_files) == (1e-5, 16, ["train.jsonl"])


def test_names_of_the_package() -> None:
    assert callable(gkd.train)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        gkd.trian  # noqa: B018
