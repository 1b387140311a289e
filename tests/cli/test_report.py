"""``gkd report --watch``: the page is written again while runs go on, and once more when they have ended."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import pytest

from gkd.cli.report import main
from gkd.driver.output_dir import claim
from tests.observability.runs import make_run, row

REFRESH = 'http-equiv="refresh" content="0.5"'


def test_the_page_is_written_until_all_runs_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    done, run = make_run(tmp_path / "done"), make_run(tmp_path / "run", 5)
    summary = (run / "summary.json").read_text()
    (run / "summary.json").unlink()
    pages: list[str] = []

    def sleep(seconds: float) -> None:
        """Play the run: a step while the program waits, and the end after the third."""
        assert seconds == 0.5
        pages.append((tmp_path / "page.html").read_text())
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row(5 + len(pages))) + "\n")
        if len(pages) == 3:
            (run / "summary.json").write_text(summary)

    monkeypatch.setattr("gkd.cli.report.time.sleep", sleep)
    assert main([str(done), str(run), "--watch", "--every", "0.5", "--output", str(tmp_path / "page.html")]) == 0
    pages.append((tmp_path / "page.html").read_text())
    assert [REFRESH in page for page in pages] == [True, True, True, False]  # at the end it stays as it is
    assert [
        "own/metric" in page and f'"steps":[{steps}]' in page for page, steps in zip(pages, STEPS, strict=True)
    ] == [True] * 4
    assert capfd.readouterr().out.splitlines()[-1].endswith("page.html")


STEPS = [",".join(map(str, range(last + 1))) for last in (5, 6, 7, 8)]


def test_a_run_that_has_just_begun_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is watched as soon as it is started, and has no step yet."""
    run = make_run(tmp_path / "run", 3)
    files = {name: (run / name).read_text() for name in ("metrics.jsonl", "summary.json")}
    for name in files:
        (run / name).unlink()
    assert main([str(run)]) == 2 and not (run / "report.html").exists()
    waited: list[bool] = []

    def sleep(_: float) -> None:
        waited.append((run / "report.html").exists())
        name = "metrics.jsonl" if len(waited) == 1 else "summary.json"
        (run / name).write_text(files[name])

    monkeypatch.setattr("gkd.cli.report.time.sleep", sleep)
    assert main([str(run), "--watch"]) == 0
    assert waited == [False, True] and (run / "report.html").exists()
    assert capfd.readouterr().err.count("\n") == 1


def test_a_run_that_failed_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    (run / "summary.json").unlink()
    end = {"time": time.time() - 90, "kind": "end", "step": 20, "text": "RunFailed: it died", "failed": True}
    (run / "events.jsonl").write_text(json.dumps(end) + "\n")
    monkeypatch.setattr("gkd.cli.report.time.sleep", lambda seconds: pytest.fail("it waits"))
    assert main([str(run), "--watch"]) == 0
    assert "RunFailed: it died" in (run / "report.html").read_text()


def test_the_page_goes_into_a_directory_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for directory in (".", str(tmp_path / "run")):
        assert main([str(run), "--output", directory]) == 0
        assert "own/metric" in (Path(directory) / "report.html").read_text()


def test_the_directory_of_a_sweep_stands_for_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep").mkdir()
    for name in ("actor.lr=1e-05", "actor.lr=0.001"):
        make_run(tmp_path / "sweep" / name)
    assert main([str(tmp_path / "sweep")]) == 0
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert "actor.lr=1e-05" in page and "actor.lr=0.001" in page
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 2
    assert "config.yaml" in capsys.readouterr().err


def test_a_run_that_ended_without_a_step_keeps_no_page_from_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one of a sweep that died while it loaded its models."""
    for name in ("a", "died", "c"):
        make_run(tmp_path / name)
    (tmp_path / "died" / "metrics.jsonl").unlink()
    assert main([str(tmp_path)]) == 0
    page, left_out = capsys.readouterr().out.splitlines()
    assert page == str(tmp_path / "report.html") and left_out.startswith(f"{tmp_path / 'died'} ")
    assert names_on(tmp_path / "report.html") == ["a", "c"]


def names_on(page: Path) -> list[str]:
    data = page.read_text().partition('id="data">')[2].partition("</script>")[0]
    return [run["name"] for run in json.loads(data)["runs"]]


def test_a_sweep_is_watched_until_its_last_run_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between two runs, when those that there are have ended."""
    make_run(tmp_path / "a")
    shown: list[list[str]] = []
    sweep = contextlib.ExitStack()

    def sleep(_: float) -> None:
        shown.append(names_on(tmp_path / "report.html"))
        if len(shown) == 1:
            make_run(tmp_path / "b")
        else:
            sweep.close()

    monkeypatch.setattr("gkd.cli.report.time.sleep", sleep)
    sweep.callback(os.close, claim(tmp_path))
    assert main([str(tmp_path), "--watch"]) == 0
    assert [*shown, names_on(tmp_path / "report.html")] == [["a"], ["a", "b"], ["a", "b"]]
