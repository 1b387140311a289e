"""report.html's data: what of a run is on the page, within bounds, and what a broken file is answered with."""

from __future__ import annotations

import io
import json
import logging
import re
import tracemalloc
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from gkd.cli.report import main
from gkd.config import load
from gkd.config.compose import compose
from gkd.config.loading import dump_public
from gkd.errors import ConfigError
from gkd.observability.metrics import wilson_interval
from gkd.observability.page import samples as chosen
from gkd.observability.page.run import (
    MAX_SPANS,
    list_differences,
    read_intervals,
    read_planned_gb,
    read_spans,
    thin_out,
)
from gkd.observability.page.samples import Texts, read_samples
from gkd.observability.page.write import page, write_at_end
from gkd.observability.report import Summary, show
from gkd.observability.run_files import RunFiles
from gkd.observability.timeline import Timeline
from tests.error_text import contains_in_order
from tests.observability.runs import NASTY, WARNING, lines, make_run, row, sample


def data_of(text: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    data: dict[str, Any] = json.loads(match[1])
    return data


def test_figures_are_those_of_the_files(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", samples=[sample(1, 0), sample(1, 1)])
    (page_run,) = data_of(page([RunFiles(run)]))["runs"]
    for number, step in enumerate(page_run["steps"]):
        for name, value in row(step).items():
            if name != "step":
                assert page_run["metrics"][name][number] == pytest.approx(value, rel=1e-6), name
    assert page_run["metrics"]["actor/loss"][0] is None  # of step 0, which has none
    assert page_run["version"] == "0.2.0"
    low, high = page_run["intervals"]["val/accuracy"]["after"]
    # Wilson's interval of 45 of 100, as statsmodels' proportion_confint(45, 100, method="wilson") has it
    assert (low, high) == pytest.approx((0.35615, 0.54756), abs=1e-5)
    assert [s["response"] for s in page_run["samples"]] == [NASTY, NASTY]
    assert page_run["placement"] == [["actor", 0, "n", "4194303", "0", "SIM-0"]]  # a pid is no number with commas


def test_no_text_ends_the_script_that_it_is_in(tmp_path: Path) -> None:
    text = page([RunFiles(make_run(tmp_path / "run", samples=[sample(1, 0)]))])
    text.encode("utf-8")
    assert text.count("</script>") == 2  # of the data and of the scripts
    assert "<!--" not in text and 'http-equiv="refresh"' not in text
    assert 'http-equiv="refresh" content="5"' in page([RunFiles(tmp_path / "run")], 5.0)


def test_many_steps_are_thinned_evenly_with_all_validations() -> None:
    rows = [{"step": step} | ({"val/accuracy": 0.5} if step % 1001 == 0 else {}) for step in range(25_001)]
    kept = [row["step"] for row in thin_out(rows)]
    assert len(kept) < 10_000 and kept[0] == 0 and kept[-1] == 25_000
    assert set(range(0, 25_000, 1001)) <= set(kept)
    assert thin_out(rows[:10_001]) == rows[:10_001]  # step 0 and 10,000 more


def test_of_many_events_the_newest_are_on_the_page(tmp_path: Path) -> None:
    """A browser draws no table of 100,000 rows."""
    run = make_run(tmp_path / "run")
    validation = {"time": 1.8e9, "kind": "validation", "step": 1, "text": "val/accuracy 0.5"}
    (run / "events.jsonl").write_text(lines([*({**WARNING, "step": step} for step in range(5_001)), validation]))
    data = data_of(page([RunFiles(run)]))
    assert [event["step"] for event in data["runs"][0]["events"]] == list(range(1, 5_001))
    assert any("events" in note for note in data["notes"])
    (run / "events.jsonl").write_text(lines([WARNING, validation]))
    data = data_of(page([RunFiles(run)]))
    assert data["runs"][0]["events"] == [WARNING] and data["notes"] == []


def test_samples_of_evenly_chosen_steps_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, texts = tmp_path / "samples.jsonl", Texts()
    file.write_text(
        lines([sample(step, i, text="t") for step in range(1, 101) for i in range(4)]) + '{"step": 101, "pro'
    )
    assert len(read_samples(file, texts)) == 400
    monkeypatch.setattr(chosen, "MAX_SAMPLES", 40)
    monkeypatch.setattr(chosen, "MAX_TOKENS", 80)
    samples = read_samples(file, texts)
    steps = sorted({s["step"] for s in samples})
    assert len(samples) == 40 and len(steps) == 10 and steps[0] == 1 and steps[-1] == 100
    assert {b - a for a, b in pairwise(steps)} == {11}
    detailed = {s["step"] for s in samples if "tokens" in s}
    assert 100 in detailed and len(detailed) == 5  # of 16 tokens each
    tokens = next(s["tokens"] for s in samples if s["step"] == 100)
    assert [list(texts)[number] for number in tokens["t"]] == ["t0", "t1", "t2", "t3"]
    assert tokens["h"][:3] == [-0.5, None, -2.5] and list(texts)[tokens["k"][0][1][0]] == "t"
    shared = read_samples(file, Texts(), share=2)  # half of both bounds
    assert len(shared) == 20 and len({s["step"] for s in shared if "tokens" in s}) == 3
    file.write_text(lines([sample(1, i, text="t") for i in range(60)]))
    assert len(read_samples(file, Texts())) == 40  # of a step that has more by itself
    assert read_samples(tmp_path / "missing.jsonl", texts) == []


def test_a_text_that_is_cut_says_so(tmp_path: Path) -> None:
    """Or a long response seems to end there."""
    (tmp_path / "samples.jsonl").write_text(lines([{"step": 1, "prompt": "a" * 20_000, "response": "b" * 21_234}]))
    (cut,) = read_samples(tmp_path / "samples.jsonl", Texts())
    assert cut["prompt"] == "a" * 20_000
    assert cut["response"] == "b" * 20_000 + "\u2026 1,234 more characters"


def test_of_samples_that_are_not_taken_nothing_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten thousand steps of 512 samples each it would be half a gigabyte."""
    file = tmp_path / "samples.jsonl"
    file.write_text(lines([{"step": step, "prompt": "a", "response": "b"} for step in range(200) for _ in range(512)]))
    monkeypatch.setattr(chosen, "MAX_SAMPLES", 600)
    tracemalloc.start()
    try:
        samples = read_samples(file, Texts())
        assert tracemalloc.get_traced_memory()[1] < 3e6
    finally:
        tracemalloc.stop()
    assert [s["step"] for s in samples] == [199] * 512


def test_what_differs_from_the_recipe() -> None:
    config = compose(["+recipe=grpo", "actor.lr=0.5", "trainer.output_dir=/a"])
    recipe = compose(["+recipe=grpo"])
    assert list_differences(config) == [("actor.lr", recipe.actor.lr, 0.5)]
    assert list_differences(recipe) == []
    assert list_differences(recipe.model_copy(update={"recipe": "mine"})) is None


def test_a_url_is_shown_without_what_may_be_secret() -> None:
    """Nor is it in what trackers are given; a text that is no URL is as it is."""
    secret = "https://bob:hunter 2@h.example:8000/v1?api-key=KEY123"
    judged = ["reward.functions=[judge]", f"reward.judge.url='{secret}'", "reward.judge.model=m?a@b"]
    config = compose(["+recipe=grpo", *judged])
    shown = {name: here for name, _, here in list_differences(config) or ()}
    assert (shown["reward.judge.url"], shown["reward.judge.model"]) == ("https://h.example:8000/v1", "m?a@b")
    assert not re.search("bob|hunter|KEY123", json.dumps(dump_public(config)))


@pytest.mark.parametrize("recipe", ["grpo", "on_policy_distill", "sft", "distill_and_reward", "gspo"])
def test_of_models_of_ones_own_the_built_in_task_is_no_difference(recipe: str) -> None:
    own = ["model.path=x", "data.train_files=[y]", "data.val_files=[z]", "data.answer_key=answer"]
    own += ["teacher.model.path=t"] if "distill" in recipe else []
    config = compose([f"+recipe={recipe}", *own, "trainer.total_steps=3"])
    names = {override.partition("=")[0] for override in own}
    assert {name for name, _, _ in list_differences(config) or ()} == {*names, "trainer.total_steps"}


def test_lanes_are_those_of_the_trace(tmp_path: Path) -> None:
    named = {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "actor 0"}}
    span = {"ph": "X", "name": "update", "pid": 7, "ts": 2_000_000, "dur": 500_000, "args": {"step": 3}}
    (tmp_path / "timeline.json").write_text(json.dumps({"traceEvents": [named, span]}))
    expected = {"name": "update", "lane": "actor 0", "start": 2.0, "length": 0.5, "step": 3, "why": None}
    assert read_spans(tmp_path / "timeline.json") == [expected]
    (tmp_path / "timeline.json").write_text("{}")
    with pytest.raises(ConfigError, match="Chrome trace"):
        read_spans(tmp_path / "timeline.json")


@pytest.mark.parametrize("n", [MAX_SPANS - 1, MAX_SPANS, MAX_SPANS + 1, 2 * MAX_SPANS])
def test_the_newest_spans_of_a_trace_are_read_and_no_others_parsed(n: int, tmp_path: Path) -> None:
    timeline, name = Timeline(tmp_path / "timeline.json", n_steps=2), '{"ph": "X"'
    for step in (1, 2):
        timeline._steps.append([])
        for at in range(n * (step - 1) // 2, n * step // 2):
            timeline._steps[-1].append(timeline._event(f"rollout {at % 3}", name, at, at + 1, step))
    timeline.write()
    spans = read_spans(tmp_path / "timeline.json")
    first = n // 2 if n > MAX_SPANS else 0  # of a step that is not all there nothing is shown
    assert [(span["lane"], span["name"], span["start"]) for span in spans] == [
        (f"rollout {at % 3}", name, at) for at in range(first, n)
    ]
    text = (tmp_path / "timeline.json").read_text()
    (tmp_path / "timeline.json").write_text(text.replace('"ts": 0', '"ts": ?', 1))
    if n > MAX_SPANS + 1:
        assert read_spans(tmp_path / "timeline.json") == spans


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("metrics.jsonl", '{"step": 0}\n{"step"\n', "metrics.jsonl line 2"),
        ("samples.jsonl", '{"prompt": 1}\n', "samples.jsonl line 1"),
        ("samples.jsonl", '{"step": 1, "prompt": "a"}\n', "samples.jsonl"),
        ("samples.jsonl", '{"step": 1, "prompt": "a", "response": "b", "reward": NaN}\n', "NaN"),
        ("samples.jsonl", '{"step": 1, "prompt": "a", "response": "b", "tokens": [1]}\n', "samples.jsonl"),
        ("summary.json", "{", "summary.json"),
        ("summary.json", "{}", "steps"),
        ("summary.json", '{"steps": 1, "wall_s": 2, "before": {}, "after": {"val/a": "b"}, "teacher": {}}', "val/a"),
        ("placement.json", '[{"group": "actor"}]', "placement.json"),
        ("timeline.json", '{"traceEvents": [{"ph": "X", "ts": 1e400}]}', "timeline.json"),
        ("samples.jsonl", '{"step": 1, "prompt": "a", "response": "b", "logprob_mean": -1e400}\n', "1e400"),
    ],
)
def test_a_broken_file_is_named_and_never_ends_a_run(
    file: str, content: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    (run / file).write_text(content)
    assert main([str(run)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gkd").addHandler(handler)
    try:
        assert write_at_end(run) is None
    finally:
        logging.getLogger("gkd").removeHandler(handler)
    (text,) = warned
    assert text.startswith("report.html ") and message in text


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other", 5)
    assert main([str(one), str(other)]) == 0
    assert capfd.readouterr().out == f"{one}/report.html\n"
    data = data_of((one / "report.html").read_text())
    assert [(run["name"], len(run["steps"])) for run in data["runs"]] == [("one", 21), ("other", 6)]
    assert main([str(one), "--watch", "--output", str(tmp_path / "page.html")]) == 0  # it has ended: once
    assert (tmp_path / "page.html").exists()
    (other / "metrics.jsonl").write_text("")
    empty = tmp_path / "empty"
    empty.mkdir()
    bad = [[str(other)], [str(empty)], [str(one), "--every", "0"], [str(one), "--output", str(tmp_path / "no/where")]]
    assert [main(arguments) for arguments in bad] == [2] * 4
    errors = capfd.readouterr().err.splitlines()
    assert all(
        contains_in_order(line, datum)
        for line, datum in zip(errors, (other, empty, "--every", "--output"), strict=True)
    )


def test_runs_of_one_name_are_told_apart_by_as_many_directories_as_it_takes(tmp_path: Path) -> None:
    places = ["a/seed0/run", "b/seed0/run", "b/seed1/run", "other"]
    runs = []
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        runs.append(RunFiles(make_run(tmp_path / place, 1)))
    assert [run["name"] for run in data_of(page(runs))["runs"]] == places
    (_, twice) = data_of(page([runs[3], RunFiles(tmp_path / "a/../other")]))["runs"]
    assert twice["name"].endswith("other")


def test_wilson_at_the_ends() -> None:
    assert wilson_interval(0.0, 10)[0] == pytest.approx(0.0)
    assert wilson_interval(1.0, 10) == pytest.approx((0.72247, 1.0), abs=1e-5)


def test_intervals_of_sets_are_of_their_standard_errors() -> None:
    values = {"val/accuracy": 0.45, "val/hard/accuracy": 0.5, "val/hard/stderr": 0.1, "val/one/accuracy": 1.0}
    intervals = read_intervals(Summary({}, values, {}, 3, 4.0, n_val=100))
    assert set(intervals) == {"val/accuracy", "val/hard/accuracy"}  # one question alone has no standard error
    assert intervals["val/hard/accuracy"]["after"] == pytest.approx((0.304, 0.696), abs=1e-3)
    assert set(read_intervals(Summary({}, values, {}, 3, 4.0, n_val=0))) == {"val/hard/accuracy"}


@pytest.mark.parametrize("teacher", [{}, {"val/accuracy": 1.0}])
def test_the_table_at_the_end_has_a_column_for_a_teacher_where_there_is_one(teacher: dict[str, float]) -> None:
    file = io.StringIO()
    summary = Summary({"val/accuracy": 0.25}, {"val/accuracy": 0.5}, teacher, 3, 4.0)
    show(summary, Path("run"), None, "gkd evaluate run", Console(file=file, width=100))
    head, row = (line.split() for line in file.getvalue().splitlines()[1:3])
    assert head == ["before", "after", *["teacher"] * len(teacher)]
    assert row == ["val/accuracy", "0.2500", "0.5000", *["1.0000"] * len(teacher)]


@pytest.mark.parametrize(("steps", "text"), [(1, "1 step in 4 s;"), (3, "3 steps in 4 s;")])
def test_the_end_of_a_run_of_one_step_is_in_the_singular(steps: int, text: str) -> None:
    file = io.StringIO()
    show(Summary({}, {}, {}, steps, 4.0), Path("run"), None, "", Console(file=file, width=100))
    assert text in file.getvalue()


def test_planned_memory_is_in_the_units_of_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """memory/* are in 10^9 bytes, as everything of this project."""
    monkeypatch.setattr("gkd.observability.page.run.models_of", lambda config: None)
    groups = [SimpleNamespace(group="actor", total=2e9), SimpleNamespace(group="rollout", total=5e8)]
    monkeypatch.setattr("gkd.observability.page.run.all_memory", lambda layout: groups)
    assert read_planned_gb(load({}), [{"gpu_uuids": ["GPU-0"]}]) == {"actor": 2.0, "rollout": 0.5}
