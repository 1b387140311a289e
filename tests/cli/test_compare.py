"""gkd compare: the table, and bad input in one line."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from gkd.cli.compare import main, show
from gkd.evaluation.comparison import Comparison, compare_all, group_by_score, read_all
from gkd.evaluation.paired import PairedDifference
from gkd.evaluation.results import Results, read_results
from gkd.evaluation.statistics import estimate
from tests.error_text import contains_in_order


def write(directory: Path, model: str, values: list[float], one: str = "sums", first: int = 0, **more: str) -> Path:
    questions = {f"q{first + i}": {"accuracy": value} for i, value in enumerate(values)}
    scores = {"accuracy": estimate(values)}
    return Results(model, one, len(values), 1, scores, questions, **more).write(directory)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = write(tmp_path, "runs/a b", [0.0, 1.0])
    assert path.name == "runs-a-b_sums_2.json"
    assert json.loads(path.read_text())["scores"]["accuracy"]["low"] == pytest.approx(0.5 - 1.96 * 0.5, abs=1e-4)
    again = read_results(path)
    assert (again.model, again.n, again.scores["accuracy"].value) == ("runs/a b", 2, 0.5)


def test_a_better_model_is_found_on_the_questions_that_both_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write(tmp_path, "base", [0.0] * 12 + [1.0] * 4)
    student = write(tmp_path, "student", [1.0] * 16 + [0.0])
    assert main([str(base), str(student), "--json", str(tmp_path / "rows.json")]) == 0
    printed = capsys.readouterr().out
    assert re.search(
        r"(?m)^sums: student .*\baccuracy\b.* base \(p = 0.0005, 16 .*\b1 question .*\baccuracy\b", printed
    )
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["paired"]["p"] == pytest.approx(2 / 2**12)
    assert row["paired"]["difference"]["value"] == 0.75


def test_a_baseline_has_its_score_on_the_questions_in_common_with_each_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write(tmp_path, "base", [0.0] * 4 + [1.0] * 16)
    quick, full = write(tmp_path, "quick", [1.0] * 4), write(tmp_path, "full", [0.0] * 2 + [1.0] * 18)
    other = write(tmp_path, "other", [0.0] * 4 + [1.0] * 16)
    assert main([str(file) for file in (base, quick, full, other)]) == 0
    table = capsys.readouterr().out.splitlines()[:6]
    assert [line.split()[1:4] for line in table] == [
        ["model", "n", "accuracy"],
        ["base", "4", "0.000"],
        ["quick", "4", "1.000"],
        ["base", "20", "0.800"],
        ["full", "20", "0.900"],
        ["other", "20", "0.800"],
    ]


def test_no_figure_is_cut_in_a_narrow_terminal(tmp_path: Path) -> None:
    name = "actor.lr=0.00001,trainer.seed=12"
    files = [write(tmp_path, one, [float(i % k == 0) for i in range(70)]) for one, k in (("base", 2), (name, 3))]
    quick = write(tmp_path, "quick", [1.0] * 5)
    for extra in ([], [quick]):
        file = io.StringIO()
        out = Console(width=80, file=file, force_terminal=True, no_color=True)
        show(compare_all(read_all([*files, *extra])), out)
        text = file.getvalue()
        assert "\u2026" not in text and re.search(
            r"\([+-]\d\.\d{3} to [+-]\d\.\d{3}\) +0\.\d{4} +0\.\d{4} +\d+\b", text
        )


def test_p_values_are_corrected_for_the_number_of_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for one in ("sums", "products"):
        write(tmp_path, "base", [0.0] * 6, one)
        write(tmp_path, "student", [1.0] * 6, one)
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"\b6 .*\(p = 0\.0625\)", printed)) == 2  # 2 / 64 twice


def test_a_set_that_cannot_be_compared_does_not_keep_others_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model, value in (("base", 0.0), ("student", 1.0)):
        write(tmp_path, model, [value], "one")
        write(tmp_path, model, [value] * 9)
        rewards = {f"q{i}": {"reward/own": value, "cost": 3.0} for i in range(9)}
        Results(model, "rewarded", 9, 1, {"reward/own": estimate([value] * 9)}, rewards).write(tmp_path)
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.search(r"\bbase\b.* student\b.* 1 .* one\b.* accuracy\b", lines[0])
    assert re.search(r"--score accuracy: base .* rewarded .* reward/own", lines[1])
    assert re.search(r"^sums: student .*\baccuracy\b.* base\b", lines[-1])
    results = group_by_score(read_all([tmp_path]))
    assert {score: {own.set for own in group} for score, group in results.items()} == {
        "accuracy": {"one", "sums"},
        "reward/own": {"rewarded"},
    }


def test_whatever_is_in_no_row_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model without a set in common with the first, and a run of a sweep that failed; others are compared."""
    for name, one in (("a", "sums"), ("b", "sums"), ("c", "products")):
        (tmp_path / name / "results").mkdir(parents=True)
        write(tmp_path / name / "results", name, [0.0, 1.0, 1.0], one)
    for name in ("a", "failed"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.yaml").touch()
    assert main([str(tmp_path)]) == 0
    run, model, *table = capsys.readouterr().out.splitlines()
    assert contains_in_order(run, f"{tmp_path / 'failed'} ", "results/")
    assert re.search(r": c .* a$", model)
    assert [line.split()[1] for line in table[:3]] == ["model", "a", "b"]


def test_questions_without_the_score_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As those whose reward failed, which both have answered."""
    for model, n in (("a", 9), ("b", 6)):
        questions = {f"q{i}": {"reward/own": 1.0} if i < n else {"length": 3.0} for i in range(9)}
        Results(model, "sums", 9, 1, {"reward/own": estimate([1.0] * n)}, questions).write(tmp_path)
    assert main([str(tmp_path), "--score", "reward/own"]) == 0
    assert re.search(r"\b6 questions .*; 3 questions .* reward/own .* left out$", capsys.readouterr().out.strip())


def test_a_quick_check_before_the_evaluation_is_no_second_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results").mkdir()
    for n in (2, 14, 3):  # by name the whole evaluation is neither the first nor the last
        write(tmp_path / "results", "a", [0.0] * n)
        quick = write(tmp_path / "results", "b", [1.0] * n)
    for directory in (tmp_path, tmp_path / "results"):
        assert main([str(directory)]) == 0
        assert "14 questions" in capsys.readouterr().out
    assert main([str(tmp_path), str(quick)]) == 2  # of files that are named nobody knows which one is meant


def test_models_are_compared_set_by_set(tmp_path: Path) -> None:
    """In whatever order their files come."""
    files = [write(tmp_path, model, [0.0] * 6, one) for model in ("base", "x", "y") for one in ("sums", "products")]
    rows = [(row.set, row.second) for row in compare_all(read_all(files))]
    assert rows == [("sums", "x"), ("sums", "y"), ("products", "x"), ("products", "y")]


def test_strategies_of_one_model_are_compared_as_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "base", [0.0] * 9)
    write(tmp_path, "base", [1.0] * 9, strategy="majority")
    assert main([str(tmp_path), "--baseline", "base"]) == 0
    assert re.search(r"sums: base majority .*higher .*base", capsys.readouterr().out)


def test_runs_of_one_name_are_told_apart_by_the_directory_above(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, value in (("a", 0.0), ("b", 1.0)):
        (tmp_path / place / "seed0" / "results").mkdir(parents=True)
        write(tmp_path / place / "seed0" / "results", "seed0", [value] * 9)
    assert main([str(tmp_path / "a" / "seed0"), str(tmp_path / "b" / "seed0")]) == 0
    assert re.search(r"sums: b/seed0 .*higher .*a/seed0", capsys.readouterr().out)


def test_evaluations_of_one_model_are_told_apart_by_as_many_directories_as_it_takes(tmp_path: Path) -> None:
    def name_all(*places: str, model: str = "student") -> list[str]:
        for place in places:
            (tmp_path / place / "results").mkdir(parents=True)
            write(tmp_path / place / "results", model, [0.0] * 9)
        return [result.model for result in read_all([tmp_path / place for place in places])]

    assert name_all("evals/before", "evals/after") == ["before/student", "after/student"]
    assert name_all("a/x/run", "b/x/run") == ["a/x/run/student", "b/x/run/student"]
    assert name_all("c/x/seed0", "d/x/seed0", model="seed0") == ["c/x/seed0", "d/x/seed0"]


def test_an_evaluation_that_was_killed_at_once_has_no_results_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results").mkdir()
    assert main([str(tmp_path)]) == 2
    assert contains_in_order(capsys.readouterr().err, f"error: {tmp_path} ", "(MODEL_SET_N.json)")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["none.json"], "none.json: No such file or directory; gkd evaluate writes such files into results/"),
        (["empty"], "empty holds no files of results (MODEL_SET_N.json)"),
        (["text.json"], "text.json is not JSON; a file that gkd evaluate wrote into results/ is expected"),
        (["list.json"], "list.json holds no results of gkd evaluate: model, set, n, scores and questions"),
        (["huge.json"], "huge.json holds no results of gkd evaluate: model, set, n, scores and questions"),
        (["a"], "there are results of a alone: name files of two models (or of two strategies)"),
        (["a", "a"], "there are results of a alone: name files of two models (or of two strategies)"),
        (["a", "b", "b"], "two files hold results of b on sums: name one of them"),
        (["a", "other"], "no other model has results on a set of a: a comparison needs the same questions"),
        (["a", "far"], "a and far have 0 questions of sums with accuracy in common: a comparison needs two or more"),
        (["a", "b", "--score", "pass@4"], "--score pass@4: a on sums has accuracy"),
        (["a", "b", "--baseline", "c"], "--baseline c: there are results of a, b"),
    ],
)
def test_bad_input_is_one_line(
    files: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("text.json").write_text("{")
    Path("list.json").write_text("[1]")
    Path("huge.json").write_text(f'{{"scores": {{}}, "questions": {{"q": {{"accuracy": 1{"0" * 400}}}}}}}')
    for name in ("a", "b"):
        write(Path(), name, [0.0, 1.0]).rename(name)
    write(Path(), "c", [0.0, 1.0], one="products").rename("other")
    write(Path(), "far", [0.0, 1.0], first=7).rename("far")
    assert main(files) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize(("needed", "named"), [(50, False), (100, False), (101, True)])
def test_more_questions_are_named_where_there_are_fewer(needed: int, named: bool) -> None:
    """Of a difference that as many would show in four of five cases, this may be the fifth."""
    paired = PairedDifference(100, estimate([0.1, 0.2]), 0.2, needed)
    row = Comparison("val", "accuracy", "base", "student", (0.1, 0.2), paired, 0.2, 0)
    out = io.StringIO()
    show([row], Console(file=out, width=200))
    assert (f"{needed} questions would" in out.getvalue()) == named
