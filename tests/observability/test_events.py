"""What events.jsonl has of a run's warnings, deaths, checkpoints and validations."""

from __future__ import annotations

import json
import logging
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from gkd.cluster.session import shutdown
from gkd.config import Config
from gkd.config.output_files import read_whole_lines
from gkd.errors import ConfigError, RunFailed, SignalExit
from gkd.observability.events import Events, note
from gkd.observability.metrics import JsonLines
from gkd.observability.tracking import MetricsLog, Trackers
from gkd.observability.watch import Watcher
from tests.error_text import contains_in_order

log = logging.getLogger("gkd")


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def test_what_happens_is_written_as_it_happens(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gkd")
    config, before = Config(), time.time()
    with Events(tmp_path / "events.jsonl") as events, Trackers(config, tmp_path, 0) as trackers:
        metrics = MetricsLog(tmp_path / "metrics.jsonl", trackers, events)
        metrics.write({"step": 0, "val/accuracy": 0.25})
        log.info("of no interest later")
        Watcher(config, "cpu").check(1, {"response/clip_ratio": 0.5})
        log.warning("rollout rank 1 died", extra={"kind": "death"})
        log.info("rollout rank 1 is there", extra={"kind": "restart"})
        metrics.write({"step": 1})
        note("checkpoint", "checkpoint of step 1: /a/b", step=1)
        assert len(rows(tmp_path)) == 5  # before the run ends
        events.finish(1)
    validation, warning, death, restart, checkpoint, end = rows(tmp_path)
    assert (validation["kind"], validation["step"], validation["metrics"]) == ("validation", 0, {"val/accuracy": 0.25})
    assert (warning["kind"], warning["step"], warning["metric"]) == ("warning", 1, "response/clip_ratio")
    expected = ["watch.truncation_rate", "rollout.max_response_length", "algorithm.overlong.action"]
    assert warning["settings"] == expected
    assert (death["kind"], death["step"], death["text"]) == ("death", 1, "rollout rank 1 died")
    assert (restart["kind"], restart["step"], restart["text"]) == ("restart", 1, "rollout rank 1 is there")
    assert (checkpoint["kind"], checkpoint["step"]) == ("checkpoint", 1)
    assert (end["kind"], end["step"], end["failed"]) == ("end", 1, False)
    assert before - 0.01 <= validation["time"] <= end["time"] <= time.time() + 0.01
    assert "checkpoint" not in capfd.readouterr().out  # in the file alone


def test_a_finished_run_that_is_stopped_while_it_closes_has_not_failed(tmp_path: Path) -> None:
    with pytest.raises(RunFailed), Events(tmp_path / "events.jsonl", 3) as events:
        events.finish(2)
        raise RunFailed("a tracker hangs")
    (end,) = rows(tmp_path)
    assert (end["step"], end["failed"]) == (2, False)
    assert contains_in_order(end["text"], "finished", "tracker hangs")


def test_a_run_that_fails_and_goes_on_appends(tmp_path: Path) -> None:
    with pytest.raises(RunFailed), Events(tmp_path / "events.jsonl"):
        raise RunFailed("two\nlines")
    with Events(tmp_path / "events.jsonl", 7, time.monotonic() - 10_000):
        note("resume", "from step 6")
    failed, resumed, end = rows(tmp_path)
    assert float(end["text"].split()[-2]) >= 10_000  # since it began, which was before Ray and the models were there
    assert failed["failed"] and failed["text"].startswith("RunFailed: two lines ")
    assert (resumed["kind"], resumed["step"]) == ("resume", 7)
    log.warning("after the end")
    assert len(rows(tmp_path)) == 3


@pytest.mark.parametrize(
    ("error", "received", "text"),
    [
        (SignalExit(signal.SIGTERM), [(signal.SIGTERM, 0.0)], "stopped by SIGTERM after"),
        (SystemExit(1), [(signal.SIGHUP, 0.0)], "stopped by SIGHUP after"),  # Ray makes that of it
        (KeyboardInterrupt(), [], "stopped by Ctrl-C after"),
        (SystemExit(1), [], "SystemExit: 1 after"),
        (TimeoutError(), [], "TimeoutError after"),
    ],
)
def test_a_run_that_was_stopped_ends_with_the_signals_name(
    error: BaseException, received: list[tuple[int, float]], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "_received", received)
    with pytest.raises(type(error)), Events(tmp_path / "events.jsonl"):
        raise error
    (end,) = rows(tmp_path)
    assert end["text"].startswith(f"{text} ")


def test_a_full_disk_loses_events_and_says_so_once(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    warned: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = warned.append  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with Events(tmp_path / "events.jsonl"):
            note("start", "one")
            note("start", "two")
    finally:
        log.removeHandler(handler)
    (lost,) = (record.getMessage() for record in warned)
    assert contains_in_order(lost, "events", "no space")


def test_a_file_of_lines_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"metrics\.jsonl"), JsonLines(tmp_path / "metrics.jsonl") as lines:
        lines.write({"step": 1})


@pytest.mark.parametrize("torn", ['{"kind": "war', '{"kind": "warning", "text": "\u00f6', "x" * 200_000])
def test_a_line_that_a_full_disk_tore_costs_that_line_alone(tmp_path: Path, torn: str) -> None:
    file = tmp_path / "events.jsonl"
    with Events(file):
        note("start", "first")
    whole = file.read_bytes()
    torn_bytes = torn.encode()
    file.write_bytes(whole + (torn_bytes[:-1] if torn_bytes[-1] > 127 else torn_bytes))
    assert len(read_whole_lines(file, kind=str, text=str)) == 2  # a run that ended so is read
    with Events(file):
        note("resume", "second")
    assert [row["text"] for row in read_whole_lines(file, kind=str, text=str)][:3:2] == ["first", "second"]
    file.write_bytes(whole + b"\xff\n")
    with pytest.raises(ConfigError, match=r"events.jsonl line 3"):
        read_whole_lines(file)
    file.write_text("no line break")
    with JsonLines(file) as lines:
        lines.write({"a": 1})
    assert read_whole_lines(file) == [{"a": 1}]


def test_a_disk_that_was_full_for_a_while_costs_no_line(tmp_path: Path) -> None:
    """Neither those before, nor the one of which a part was written, nor those after."""
    limits, long = resource.getrlimit(resource.RLIMIT_FSIZE), "x" * 20_000
    with JsonLines(tmp_path / "events.jsonl") as lines:
        lines.write({"n": 0, "text": long})
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
            for n in (1, 2):
                with pytest.raises(OSError, match=r"events\.jsonl"):
                    lines.write({"n": n, "text": long})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        lines.write({"n": 3, "text": long})
    assert rows(tmp_path) == [{"n": n, "text": long} for n in range(4)]


def test_a_run_goes_on_while_the_disk_is_full_and_its_lines_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits, long = resource.getrlimit(resource.RLIMIT_FSIZE), "x" * 20_000
    caplog.set_level(logging.INFO, "gkd")
    with JsonLines(tmp_path / "events.jsonl") as lines:
        lines.keep({"n": 0, "text": long})
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
            for n in (1, 2):
                lines.keep({"n": n, "text": long})
            with pytest.raises(OSError, match=r"events\.jsonl"):  # no checkpoint is complete without them
                lines.require_written()
            monkeypatch.setattr("gkd.observability.metrics.MOST_KEPT_BYTES", 50_000)
            with pytest.raises(OSError, match=r"events\.jsonl"):
                lines.keep({"n": 3, "text": long})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        lines.keep({"n": 4, "text": long})
    assert rows(tmp_path) == [{"n": n, "text": long} for n in range(5)]
    (warning, line) = (record.getMessage() for record in caplog.records)
    assert contains_in_order(warning, "events.jsonl", "written later") and "whole again" in line


def test_lines_that_never_found_room_are_named_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with JsonLines(tmp_path / "events.jsonl") as lines:
            lines.keep({"n": 0})
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
            lines.keep({"n": 1, "text": "x" * 40_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contains_in_order(caplog.text, "events.jsonl", "written later", "events.jsonl", "are lost")
