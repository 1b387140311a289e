"""What the monitor says of a run's files; the whole program beside a run is in tests/e2e."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from rich.console import Console

from gkd.cli.monitor import advice, main, progress_line, read_resident_gb
from gkd.cluster.gpu import Gpu
from gkd.cluster.health.queues import EngineQueue, QueueFile, Queues
from gkd.errors import ConfigError
from gkd.observability.live import curves, sparkline
from gkd.observability.run_files import RunFiles

CARD = Gpu(0, "GPU-1", "a card", "9.0", 80_000_000_000, 30_000_000_000)


@pytest.fixture
def run(tmp_path: Path) -> RunFiles:
    (tmp_path / "config.yaml").write_text("trainer: {total_steps: 10}\n")
    placed = [
        {"group": g, "rank": 0, "node": "127.0.0.1", "pid": os.getpid(), "gpu_uuids": ["GPU-1"]}
        for g in ("actor", "rollout")
    ]
    (tmp_path / "placement.json").write_text(json.dumps(placed))
    rows = [{"step": 0, "val/accuracy": 0.25}, {"step": 1, "timing_s/step": 30.0, "distill/loss": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 2, "timi')
    return RunFiles(tmp_path)


def test_progress_is_that_of_the_last_whole_line(run: RunFiles) -> None:
    line = progress_line(run)
    assert "step 1/10  30.00 s/step  4:30 left" in line
    assert "val/accuracy 0.25" in line
    (run.path / "summary.json").write_text("{}")
    assert progress_line(run).endswith("finished, 1 step")


def test_the_time_that_is_left_is_by_several_steps_without_the_first_one(run: RunFiles) -> None:
    """Those with long responses take long, and a first one compiles."""
    rows = [{"step": step, "timing_s/step": seconds} for step, seconds in enumerate((100.0, 10.0, 30.0, 5.0), 1)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "step 4/10  5.00 s/step  1:30 left" in progress_line(run)
    rows = [{"step": step, "timing_s/step": 1.0 if step < 80 else 10.0 + 19 * (step == 100)} for step in range(1, 101)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run.path / "config.yaml").write_text("trainer: {total_steps: 106}\n")
    assert "1:06 left" in progress_line(RunFiles(run.path))


def test_groups_and_their_processes(run: RunFiles, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.groups_on("GPU-1") == ["actor", "rollout"]
    assert run.groups_on("GPU-2") == []
    assert run.pids() == {"actor": [os.getpid()], "rollout": [os.getpid()]}
    placed = json.loads((run.path / "placement.json").read_text())
    placed[0]["node"], placed[1]["node"] = "192.0.2.1", "127.0.0.1/0a1b2c3d"
    (run.path / "placement.json").write_text(json.dumps(placed))
    assert run.pids() == {"actor": [], "rollout": [os.getpid()]}  # the first is a program of another machine
    assert main([str(run.path), "--once"]) == 0
    actor, rollout = (
        line.split()[1:4] for line in capsys.readouterr().out.splitlines() if line[:5] in ("actor", "rollo")
    )
    assert actor == ["0", "of", "1"] and rollout == ["1", "of", "1"]
    assert read_resident_gb(os.getpid()) > 0.01
    assert read_resident_gb(2**22 + 1) is None


@pytest.mark.parametrize(
    ("free", "last", "expected"),
    [
        (30.0, {}, ""),
        (2.0, {}, "lower rollout.gpu_memory_utilization"),
        (30.0, {"memory/actor/alloc_retries": 3}, "expandable_segments"),
        (30.0, {"memory/actor/ooms": 1}, "actor.max_tokens_per_micro_batch="),
    ],
)
def test_advice(run: RunFiles, free: float, last: dict[str, float], expected: str) -> None:
    card = Gpu(0, "GPU-1", "a card", "9.0", 80_000_000_000, round(free * 1e9))
    text = advice(card, ["actor", "rollout"], last, run)
    assert expected in text
    assert bool(expected) == bool(text)
    (run.path / "config.yaml").write_text("trainer: {total_steps: 10}\nweights: {transfer: ipc}\n")
    assert "expandable_segments" not in advice(card, ["actor", "rollout"], last, run)  # refused there


def test_the_memory_of_a_gpu_has_its_unit(
    run: RunFiles, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gkd.cluster.gpu.read_gpus", lambda: [CARD])
    (run.path / "metrics.jsonl").write_text('{"step": 1, "memory/actor/allocated_gb": 12.34, "memory/actor/ooms": 0}\n')
    (head, card) = text_of(run, capfd, "--once").splitlines()[2:4]
    for title, cell in (("total GB", "80.0"), ("free GB", "30.0"), ("allocated GB", "12.3"), ("ooms", "0")):
        end = head.index(title) + (len(title) if title not in ("total GB", "free GB") else 0)
        assert card[end:].startswith(cell) or card[:end].endswith(cell), title


def test_what_the_monitor_advises_for_the_actor_is_what_a_plan_tries(run: RunFiles) -> None:
    """The mildest values, of what costs time alone, and of settings that are not so already."""
    actor = "actor: {max_tokens_per_micro_batch: 8192, loss_chunk: 64, gradient_checkpointing: true}\n"
    (run.path / "config.yaml").write_text(f"trainer: {{total_steps: 10}}\n{actor}")
    text = advice(CARD, ["actor"], {"memory/actor/ooms": 1}, run)
    assert text.partition(": ")[2] == "actor.max_tokens_per_micro_batch=4096 actor.loss_chunk=32"


def test_a_run_whose_settings_this_version_has_not_is_shown_without_advice(run: RunFiles) -> None:
    (run.path / "config.yaml").write_text("trainer: {total_steps: 10, no_such_setting: 1}\n")
    assert run.read_config() is None
    for figure in ("ooms", "alloc_retries"):
        text = advice(CARD, ["actor"], {f"memory/actor/{figure}": 1}, run)
        assert text and "actor." not in text


def test_where_there_is_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        RunFiles(tmp_path)
    assert main([str(tmp_path)]) == 2
    assert main(["--every", "0"]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 2


def text_of(run: RunFiles, capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([str(run.path), *arguments]) == 0
    return capfd.readouterr().out


def test_curves_stages_warnings_and_a_sample(run: RunFiles, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [{"step": s, "val/own": float(s), "timing_s/step": 4.0, "timing_s/update": 1.0} for s in range(1, 9)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [{"time": 0, "kind": kind, "text": f"{kind} {n}"} for n in range(4) for kind in ("warning", "checkpoint")]
    (run.path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    sample = {"step": 7, "prompt": "what\nis \x1b[31m2 + 2", "response": "4" * 500}
    (run.path / "samples.jsonl").write_text(json.dumps(sample) + '\n{"step": 8, "pro')
    text = text_of(run, capfd, "--once")
    assert "val/own" in text and "▁▂▃▄▅▆▇█" in text
    (stage,) = (line for line in text.splitlines() if line.startswith("update"))
    assert stage.split() == ["update", "1.00", "s", "█" * 10]  # a quarter of forty
    assert [line.split(": ")[1] for line in text.splitlines() if line.startswith("warning")] == [
        "warning 1", "warning 2", "warning 3",
    ]  # fmt: skip
    assert "step 7: what is [31m2 + 2" in text and "\x1b" not in text
    assert f"-> {'4' * 240}..." in text


def test_the_last_sample_is_shown_however_long_it_is(run: RunFiles, capfd: pytest.CaptureFixture[str]) -> None:
    """As those of long responses with all of their tokens."""
    sample = {"step": 7, "prompt": "2 + 2", "response": "4", "tokens": {"text": ["x" * 100] * 30_000}}
    earlier = json.dumps({**sample, "step": 6})
    (run.path / "samples.jsonl").write_text(f"{earlier}\n{json.dumps(sample)}\n{earlier[:-10]}")
    assert "step 7: 2 + 2\n-> 4" in text_of(run, capfd, "--once")
    (run.path / "samples.jsonl").write_text("x" * 1_000_000)
    assert "->" not in text_of(run, capfd, "--once")


def test_engines_with_their_queues(
    run: RunFiles, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the run writes them; those that are not healthy come first, then the fullest."""
    rows = [EngineQueue(i, "dead" if i == 9 else "healthy", sampling=i, scoring=10 * i) for i in range(12)]
    file, calls = QueueFile(run.path / "engines.json"), []
    monkeypatch.setattr("gkd.cluster.health.queues.time", SimpleNamespace(monotonic=iter((7.0, 7.5, 7.9)).__next__))
    for _ in range(3):  # once a second at most
        file.write_if_due(lambda: calls.append(1) or Queues(time.time(), 1_234, 16, rows))
    assert calls == [1] and [path.name for path in run.path.glob(".engines*")] == []
    lines = text_of(run, capfd, "--once").splitlines()
    shown = [line.split() for line in lines if line.startswith("engine ")]
    assert [row[1] for row in shown] == ["9", "11", "10", "8", "7", "6", "5", "4"]
    assert shown[0] == ["engine", "9", "9", "of", "16", "slots", "sampling", "90", "being", "scored", "dead"]
    assert re.search(r"\b4 more\b", "\n".join(lines)) and re.search(
        r"\bwait\b.*: 1,234$", "\n".join(lines), re.MULTILINE
    )
    old = json.loads((run.path / "engines.json").read_text()) | {"time": 0}
    (run.path / "engines.json").write_text(json.dumps(old))
    assert "1,234, " in text_of(run, capfd, "--once") and " s ago" in text_of(run, capfd, "--once")
    (run.path / "summary.json").write_text("{}")
    assert "engine 9" not in text_of(run, capfd, "--once")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("engines.json", '{"time": 0}', "waiting"),
        ("engines.json", '{"time": 0, "waiting": 0, "slots": 1, "engines": [{"rank": 0, "health": 1}]}', "health"),
        ("engines.json", "[1]", "dict"),
        ("metrics.jsonl", '{"step": 1}\n[1, 2]\n', "line 2"),
        ("metrics.jsonl", '{"loss": 1}\n', "step"),
        ("metrics.jsonl", '{"step": 1, "timing_s/step": "slow"}\n', "timing_s/step"),
        ("metrics.jsonl", '{"step": 1, "timing_s/step": NaN}\n', "NaN"),
        ("events.jsonl", "[" * 100_000 + "\n", "deep"),
        ("events.jsonl", '{"kind": "warning"}\n', "time"),
        ("placement.json", "{", "placement.json"),
        ("placement.json", "[1]", "record 1"),
        ("placement.json", '[{"group": "actor", "node": "n", "gpu_uuids": []}]', "pid"),
        ("placement.json", '[{"group": "actor", "node": "n", "pid": -1, "gpu_uuids": []}]', "pid=-1"),
        ("placement.json", '[{"group": "actor", "node": "n", "pid": 1, "gpu_uuids": [[]]}]', "gpu_uuids"),
        ("metrics.jsonl", '{"step": 1, "timing_s/step": 1e400}\n', "1e400"),
        ("metrics.jsonl", f'{{"step": 1, "timing_s/step": 1{"0" * 400}}}\n', "100000"),
        ("config.yaml", "trainer: 5\n", "lacks trainer.total_steps"),
        ("config.yaml", "a: [\n", "config.yaml"),
    ],
)
def test_files_that_are_not_a_runs_are_one_line(
    run: RunFiles, capfd: pytest.CaptureFixture[str], file: str, content: str, message: str
) -> None:
    (run.path / file).write_text(content)
    assert main([str(run.path), "--once"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line and file in line


def test_a_run_that_has_diverged_is_shown(run: RunFiles, capfd: pytest.CaptureFixture[str]) -> None:
    """Up to the largest number that a run can write: sums of such are beyond floats."""
    rows = [{"step": step, "val/own": 1.5e308, "timing_s/step": 1.0, "timing_s/update": 1e308} for step in range(90)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "1.5e+308" in text_of(run, capfd, "--once")


def test_queues_that_cannot_be_written_are_no_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    QueueFile(tmp_path / "nowhere" / "engines.json").write_if_due(lambda: Queues(0.0, 0, 1, []))
    with monkeypatch.context() as failing:  # as on a server of files that does not answer
        for call in ("replace", "unlink"):
            failing.setattr(Path, call, Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
        QueueFile(tmp_path / "engines.json").write_if_due(lambda: Queues(0.0, 0, 1, []))


def test_a_run_that_has_just_begun_has_nothing_more(run: RunFiles, capfd: pytest.CaptureFixture[str]) -> None:
    (run.path / "metrics.jsonl").unlink()
    assert "step 0/10" in text_of(run, capfd)


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """As a run holds its directory."""
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
    os.close(descriptor)


def test_a_run_that_failed_is_not_waited_for(run: RunFiles, capfd: pytest.CaptureFixture[str]) -> None:
    """Once it has had time to begin again by itself."""
    end = {"time": time.time() - 30, "kind": "end", "text": "WorkerDied: rollout 0 after 9 s", "failed": True}
    (run.path / "events.jsonl").write_text(json.dumps(end) + "\n")
    assert not run.has_ended
    (run.path / "events.jsonl").write_text(json.dumps(end | {"time": time.time() - 90}) + "\n")
    assert run.has_ended
    with claimed(run.path):  # begun again, and nothing written yet
        assert not run.has_ended
    assert "step 1/10  WorkerDied: rollout 0" in text_of(run, capfd, "--every", "600")
    with (run.path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "kind": "resume", "text": "from step 1"}) + "\n")
    assert not run.has_ended


def test_no_text_of_an_event_steers_the_terminal(run: RunFiles, capfd: pytest.CaptureFixture[str]) -> None:
    """As those that other versions wrote."""
    kinds = "warning", "end"
    events = [{"time": 0, "kind": kind, "text": f"{kind}: \x1b[31mred\nx\x07", "failed": True} for kind in kinds]
    (run.path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    text = text_of(run, capfd, "--once")
    assert all(f"{kind}: [31mred x" in text for kind in kinds)
    assert "\x1b" not in text and "\x07" not in text


def test_a_finished_run_that_begins_again_is_waited_for(run: RunFiles) -> None:
    """Its summary is there until its models are loaded."""
    (run.path / "summary.json").write_text("{}")
    with claimed(run.path):
        held = run.has_ended, progress_line(run)
    free = run.has_ended, progress_line(run)
    assert not held[0] and re.search(r"finished, 1 step; starting again\b", held[1])
    assert free[0] and free[1].endswith("finished, 1 step")
    (run.path / "config.yaml").write_text("trainer:\n  total_steps: 77\n")
    (run.path / "summary.json").unlink()
    assert "step 1/77" in progress_line(run)


def test_a_run_that_was_killed_is_not_waited_for(run: RunFiles, capfd: pytest.CaptureFixture[str]) -> None:
    """It says nothing itself: its workers on this machine are gone, and nothing is written."""
    gone = 2**22 + 1  # more than Linux numbers processes

    def ends(node: str, pid: int, seconds_ago: float = 90.0) -> bool:
        (run.path / "placement.json").write_text(
            json.dumps([{"group": "actor", "node": node, "pid": pid, "gpu_uuids": []}])
        )
        for file in run.path.iterdir():
            os.utime(file, (time.time() - seconds_ago,) * 2)
        (run.path / "report.html").write_text("")  # by who watches
        return run.has_ended

    assert not ends("127.0.0.1", os.getpid())
    assert not ends("203.0.113.1", gone)  # on another machine, which cannot be seen from here
    assert not ends("127.0.0.1", gone, seconds_ago=5.0)
    assert ends("127.0.0.1", gone)
    assert "killed" in text_of(run, capfd, "--every", "600")
    with claimed(run.path):
        assert not run.has_ended


def test_in_a_narrow_terminal_curves_become_shorter_and_names_and_figures_stay() -> None:
    rows = [{"perf/tokens_per_second": 1000.0 + step} for step in range(99)] + [{"perf/tokens_per_second": 65432.0}]
    for width, length in ((60, 20), (100, 40)):
        console = Console(file=io.StringIO(), width=width)
        console.print(curves(rows))
        name, curve, *figures = console.file.getvalue().splitlines()[1].split()  # type: ignore[attr-defined]
        assert (name, figures) == ("perf/tokens_per_second", ["1,000", "65,432"])
        assert length <= len(curve) <= 40 and curve.endswith("█")


@pytest.mark.parametrize("n", [1, 7, 40, 1000])
def test_a_curve_goes_from_the_lowest_to_the_highest(n: int) -> None:
    curve = sparkline([float(i) for i in range(n)])
    assert len(curve) == min(n, 40) and list(curve) == sorted(curve)
    assert n == 1 or (curve[0], curve[-1]) == ("▁", "█")
