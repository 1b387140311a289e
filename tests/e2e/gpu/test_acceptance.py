"""The acceptance run itself: it goes on whatever a check does, and leaves a record of each and no process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import psutil
import pytest

from gkd.cli.doctor.devices import NO_GPUS, Gpus
from gkd.cluster.gpu import Gpu
from gkd.errors import ConfigError
from tests.e2e.conftest import ROOT
from tests.gpu import acceptance
from tests.gpu.acceptance import Outcome
from tests.gpu.checks import CHECKS, Check

NAMES = ("fine", "fails", "raises", "skips", "dies", "hangs", "leaves_a_process", "breaks_at_the_end")
FAKES = [Check(name, f"tests.gpu.fakes:{name}", 1, 5 if name == "hangs" else 60) for name in NAMES]


@pytest.fixture(autouse=True)
def _ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "GRACE_S", 1.0)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("acceptance") / "log"


@pytest.fixture(scope="module")
def ended(log: Path) -> dict[str, Outcome]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptance, "GRACE_S", 1.0)
        outcomes = list(acceptance.outcomes(FAKES, 5, 1, log.parent, log))
    assert [outcome.name for outcome in outcomes] == list(NAMES)  # the next one runs whatever the last one did
    return {outcome.name: outcome for outcome in outcomes}


@pytest.mark.parametrize(
    ("name", "status", "ok", "failed"),
    [
        ("fine", "ok", True, ""),
        ("fails", "failed", False, "2 is not 3"),
        ("raises", "failed", False, "KeyError: 'nothing there'"),
        ("skips", "skipped", None, "needs a lake"),
        ("dies", "died", False, "signal SIGKILL; about to die"),
        ("hangs", "timed out", False, "ended after 5 s; it waits"),
        ("leaves_a_process", "ok", True, ""),
        ("breaks_at_the_end", "died", False, "signal SIGABRT; "),
    ],
)
def test_every_end_is_named(ended: dict[str, Outcome], name: str, status: str, ok: bool | None, failed: str) -> None:
    outcome = ended[name]
    assert (outcome.status, outcome.ok) == (status, ok)
    assert outcome.failed.startswith(failed)
    assert bool(outcome.failed) == bool(failed)


def test_figures_survive_what_happens_to_the_check(ended: dict[str, Outcome]) -> None:
    assert ended["fine"].figures == {"speed": 1.2346, "n_gpus": 1}
    assert ended["fails"].figures == {"seen": 2}
    assert ended["dies"].figures == {"before": 1}


def test_where_a_check_was_when_its_time_was_over_is_in_the_log(ended: dict[str, Outcome], log: Path) -> None:
    text = log.read_text().partition("=== hangs:")[2]
    assert "in hangs\n" in text
    assert ended["hangs"].failed == "ended after 5 s; it waits"


def test_nothing_is_left_running(ended: dict[str, Outcome]) -> None:
    for name in ("hangs", "leaves_a_process"):
        pid = ended[name].figures["pid"]
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


ENDED_BY_A_SIGNAL = """
import sys
from tests.gpu import acceptance
from tests.gpu.checks import Check
names = ("fine", "runs_a_program", "fails")
acceptance.CHECKS = [Check(name, f"tests.gpu.fakes:{name}", 1, 60) for name in names]
acceptance.GRACE_S = 1.0
sys.exit(acceptance._main(["--rehearse", "--json", sys.argv[1]]))
"""


def test_a_signal_leaves_all_that_was_measured_and_printed(tmp_path: Path) -> None:
    """Of the check under way too: steps of the run that it waits for, and that run's last words."""
    command = [sys.executable, "-c", ENDED_BY_A_SIGNAL, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    figures, deadline = tmp_path / "runs_a_program.json", time.monotonic() + 120
    while not figures.exists() or "small_steps" not in figures.read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    assert "a step is done" in (tmp_path / "acceptance.log").read_text()
    process.terminate()
    printed = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == 1
    rows = [json.loads(line) for line in (tmp_path / "acceptance.jsonl").read_text().splitlines()]
    assert [json.loads(line) for line in printed if line.startswith("{")] == rows
    assert [(row["name"], row["status"], row["ok"]) for row in rows] == [
        ("fine", "ok", True),
        ("runs_a_program", "interrupted", False),
        ("fails", "not run", None),
    ]
    assert rows[1]["failed"].endswith("a step is done") and "runs_a_program" in rows[2]["failed"]
    assert rows[1]["figures"]["small"] == {"perf/pid": rows[1]["figures"]["small"]["perf/pid"], "timing_s/step": 2.5}
    assert "it is being ended" in (tmp_path / "acceptance.log").read_text()
    assert len(printed) == 6  # and the table


def test_what_no_time_is_left_for_is_not_run(tmp_path: Path) -> None:
    outcomes = [*acceptance.outcomes(FAKES, 0.01, 1, tmp_path, tmp_path / "log")]
    assert {(outcome.status, outcome.ok) for outcome in outcomes} == {("not run", None)}
    assert "--minutes" in outcomes[0].failed


def test_a_check_gets_no_more_time_than_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def note(check: Check, limit_s: float, *rest: object) -> Outcome:
        limits.append(limit_s)
        return Outcome(check.name, "ok")

    monkeypatch.setattr(acceptance, "run_check", note)
    list(acceptance.outcomes([replace(FAKES[0], limit_s=20), replace(FAKES[0], limit_s=600)], 1, 1, tmp_path, tmp_path))
    list(acceptance.outcomes([replace(FAKES[0], limit_s=10)], 1, 0, tmp_path, tmp_path))  # a rehearsal
    assert limits[0] == 20
    assert 30 < limits[1] <= 60
    assert limits[2] == 40


def test_what_needs_gpus_is_skipped_and_never_ok_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "run_check", lambda check, *_: Outcome(check.name, "ok"))
    for n_gpus, skipped in (
        (0, ["ranks_memory", "mps"]),
        (1, ["two_gpus", "ranks_memory", "shards"]),
        (2, []),
    ):
        outcomes = [*acceptance.outcomes(CHECKS, 9, n_gpus, tmp_path, tmp_path)]
        assert [outcome.name for outcome in outcomes if outcome.status == "skipped"] == skipped
        assert all("GPU" in outcome.failed for outcome in outcomes if outcome.status == "skipped")


def test_a_runner_that_breaks_on_one_check_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> Outcome:
        raise OSError("no space left")

    monkeypatch.setattr(acceptance, "run_check", breaks)
    outcomes = [*acceptance.outcomes(FAKES[:2], 5, 1, tmp_path, tmp_path)]
    assert [outcome.failed for outcome in outcomes] == ["OSError: no space left"] * 2


def test_a_check_that_runs_again_replaces_its_record(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    for name, status in (("ipc", "failed"), ("versions", "ok"), ("ipc", "ok")):
        acceptance.keep(acceptance.record(Outcome(name, status, 1.0), {"torch": "2.13.0"}, False), file)
    rows = json.loads(file.read_text())["checks"]
    assert [(row["name"], row["ok"], row["rehearsal"]) for row in rows] == [
        ("versions", True, False),
        ("ipc", True, False),
    ]
    assert rows[0]["versions"] == {"torch": "2.13.0"}


def test_the_machine_and_the_wish_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = Gpus("570.1", 13000, [Gpu(0, "GPU-0", "H200", "9.0", 1, 1)], [0])
    monkeypatch.setattr(acceptance, "installed_device", lambda: "cuda")
    assert acceptance._n_gpus(h200, False) == 1
    assert acceptance._n_gpus(NO_GPUS, True) == 0
    for gpus, rehearse in ((h200, True), (NO_GPUS, False)):
        with pytest.raises(ConfigError):
            acceptance._n_gpus(gpus, rehearse)
    monkeypatch.setattr(acceptance, "installed_device", lambda: "cpu")
    with pytest.raises(ConfigError, match="CPU build"):
        acceptance._n_gpus(h200, False)


def test_the_pages_have_its_checks_as_they_are() -> None:
    """How many there are, how long those of one GPU take, which do not fit into its time, and which do not rehearse."""
    by_default = [check for check in CHECKS if not check.on_request]
    of_one_gpu = [check for check in by_default if check.n_gpus == 1]
    ends = accumulate(check.estimate_s for check in of_one_gpu)
    too_late = [check.name for check, end in zip(of_one_gpu, ends, strict=True) if end > 9 * 60]
    minutes = round(sum(check.estimate_s for check in of_one_gpu) / 60)
    gpus_alone = [check.name for check in CHECKS if not check.rehearses]
    expected = (
        f"{len(by_default)} checks ({len(CHECKS) - len(by_default)} more by name)",
        f"{len(of_one_gpu)} of one GPU take about {minutes} minutes",
        f"the last {len(too_late)} (`{'`, `'.join(too_late)}`)",
        f"all but `{'` and `'.join(gpus_alone)}`",
    )
    assert acceptance.__doc__ is not None
    for text in (acceptance.__doc__.replace("``", "`"), (ROOT / "docs" / "weights.md").read_text()):
        page = " ".join(text.split())
        assert [part for part in expected if part not in page] == []
    assert expected[-1] in (ROOT / "CONTRIBUTING.md").read_text()
    assert all(check.estimate_s < check.limit_s for check in CHECKS)
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_its_help_is_no_failure() -> None:
    done = subprocess.run(
        [sys.executable, acceptance.__file__, "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_rehearsed_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "RESULTS", tmp_path / "results")
    names = ["attention", "ipc", "assignment", "update_profile", "mps"]
    assert acceptance._main(["--rehearse", "--only", *names, "--json", str(tmp_path / "out")]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert printed == [json.loads(line) for line in (tmp_path / "out" / "acceptance.jsonl").read_text().splitlines()]
    attention, ipc, done, profiled, skipped = printed
    outcomes = [(row["name"], row["ok"], row["rehearsal"]) for row in printed]
    assert outcomes == [(name, name != "mps" or None, True) for name in names]
    rows = {name: figure for name, figure in attention["figures"].items() if name.startswith("rows_")}
    kernel = [figure for name, figure in attention["figures"].items() if name not in rows]
    assert len(kernel) == 18 and all(1e-4 < figure < 2e-2 for figure in kernel)
    assert rows.keys() == {"rows_gemma2", "rows_qwen3_5"} and all(0 < figure < 1e-5 for figure in rows.values())
    assert ipc["figures"]["pushes"] == 4 and ipc["figures"]["memory_grown_gib"] == 0
    assert all(profiled["figures"][name] > 0 for name in ("update_128_s", "update_64_s", "score_s", "loss_roomy_ms"))
    assert done["figures"]["uuids"][0].startswith("SIM-")
    assert {"python", "torch", "ray"} <= done["versions"].keys()
    assert skipped["failed"] == "needs a GPU"
    assert "GPU Assignments: ['0', '0', '0']" in (tmp_path / "out" / "acceptance.log").read_text()
    assert not (tmp_path / "results").exists()
