"""trainer.stop_early: when a figure of validation counts as not getting better, and a run that ended for it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gkd.config import Config, load
from gkd.config.validating import StopEarly, require_figures
from gkd.driver.checkpoints.resume import explain_finished, find
from gkd.driver.validation.early_stop import EarlyStop
from gkd.errors import ConfigError
from tests.data.models import save_model


@pytest.mark.parametrize(
    ("metric", "min_delta", "values", "stops"),
    [
        ("val/accuracy", 0.0, [0.1, 0.2, 0.2, 0.2], True),
        ("val/accuracy", 0.0, [0.1, 0.2, 0.2, 0.3], False),
        ("val/accuracy", 0.0, [0.1, 0.0, 0.05], True),
        ("val/accuracy", 0.05, [0.10, 0.14, 0.16, 0.17], False),  # 0.16 is more than 0.05 above the first
        ("val/accuracy", 0.05, [0.10, 0.14, 0.15], True),
        ("val/loss", 0.0, [3.0, 2.0, 1.0, 0.9], False),
        ("val/hard/length", 0.0, [3.0, 3.0, 4.0], True),
        ("val/accuracy", 0.0, [0.5], False),
        (None, 0.0, [0.5, 0.4, 0.3, 0.2], False),
    ],
)
def test_so_many_validations_without_a_gain_end_a_run(
    metric: str | None, min_delta: float, values: list[float], stops: bool
) -> None:
    settings = StopEarly(metric=metric, **({"patience": 2, "min_delta": min_delta} if metric else {}))
    reason = settings.reason([(10 * i, value) for i, value in enumerate(values)])
    assert (reason is not None) == stops
    assert reason is None or "trainer.stop_early.patience=2" in reason


def test_a_figure_that_validation_does_not_measure_is_refused() -> None:
    trainer = load({"trainer": {"stop_early": {"metric": "val/accuracy"}}}).trainer
    require_figures(trainer, {"val/accuracy": 1.0})
    with pytest.raises(ConfigError, match=r"trainer.stop_early.metric=val/accuracy: validation measures val/loss"):
        require_figures(trainer, {"val/loss": 1.0})


def test_a_torn_last_line_is_left_out_and_another_is_named(tmp_path: Path) -> None:
    rows, settings = tmp_path / "metrics.jsonl", StopEarly(metric="val/accuracy", patience=1)
    whole = "".join(json.dumps({"step": step, "val/accuracy": 0.5}) + "\n" for step in (0, 10))
    rows.write_text(whole + '{"step": 20, "val/accu')
    assert EarlyStop(settings, rows).reason is not None
    rows.write_text("garbled\n" + whole)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl line 1"):
        EarlyStop(settings, rows)


def test_a_run_that_was_stopped_is_finished_until_it_is_to_wait_longer(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 20}))
    rows = [{"step": step, "val/accuracy": value} for step, value in ((0, 0.5), (10, 0.5), (20, 0.4))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(patience: int) -> Config:
        stop = {"metric": "val/accuracy", "patience": patience}
        return load({"trainer": {"total_steps": 100, "stop_early": stop}})

    text = explain_finished(config(2), tmp_path)
    assert text is not None and re.search(r"\bstep 20\b.* 0\.5000 .*\bstep 0\b", text)
    assert explain_finished(config(3), tmp_path) is None
    # Without a checkpoint nothing goes on, whatever trainer.stop_early is, and trainer.resume=auto begins nothing.
    model = rf"model\.path={re.escape(str(tmp_path))}/model$"
    assert re.search(model, text)
    with pytest.raises(ConfigError, match=rf"is finished: .*{model}"):
        find(config(3), tmp_path)
