"""What a run prints: lines that stay, validations with their change, and the table of workers."""

from __future__ import annotations

import errno
import io
import sys

import pytest
from rich.console import Console

from gkd.cluster.layout.assignment import placement_table
from gkd.observability.progress import Progress, changes, console, print_table, rewrites
from tests.cluster.layout.test_assignment import report


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(terminal: bool, steps: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that stay of steps of four seconds each, with validations after every tenth."""
    now = 0.0
    monkeypatch.setattr("gkd.observability.progress.time.monotonic", lambda: now)
    file = Terminal() if terminal else io.StringIO()
    progress = Progress(Console(file=file, force_terminal=terminal, width=100, highlight=False), steps)
    progress.validated = {"val/accuracy": 0.25}
    for step in range(1, steps + 1):
        now += 4.0
        validated = {"val/accuracy": 0.25 + step / 100, "val/own": 1.0} if step % 10 == 0 else {}
        progress.step(step, {"distill/loss": 1.0, **validated})
    return file.getvalue().splitlines()


@pytest.mark.parametrize(("terminal", "every"), [(False, 3), (True, 15)])
def test_a_step_stays_every_so_often_and_every_validation(
    terminal: bool, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed(terminal, 40, monkeypatch)
    steps = [int(line.split()[1].split("/")[0]) for line in lines if line.startswith("step ")]
    assert steps == sorted({*range(1, 41, every), 40})
    validations = [line for line in lines if line.startswith("validation")]
    assert [int(line.split("  ")[0].split()[-1]) for line in validations[:2]] == [10, 20]
    assert [line.split("  ")[1:] for line in validations[:2]] == [
        ["val/accuracy 0.3500 (+0.1000)", "val/own 1.0000"],
        ["val/accuracy 0.4500 (+0.1000)", "val/own 1.0000 (+0.0000)"],
    ]


def test_the_time_left_is_by_the_steps_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which warms caches up, and was not begun when the clock was read first."""
    lines = [line.split("  ") for line in printed(False, 40, monkeypatch) if line.startswith("step ")]
    left = {parts[0]: parts[-1] for parts in lines if parts[-1].endswith(" left")}
    assert "step 1/40" not in left and len(left) == len(lines) - 1
    assert (left["step 4/40"], left["step 37/40"], left["step 40/40"]) == ("2:24 left", "0:12 left", "0:00 left")


def test_a_set_with_an_interval_of_its_own_changes_since_its_own_last_validation() -> None:
    file = io.StringIO()
    progress = Progress(Console(file=file, width=100), 30)
    progress.step(10, {"val/accuracy": 0.25, "val/own": 0.5})
    progress.step(20, {"val/accuracy": 0.5})
    progress.step(30, {"val/own": 1.0})
    lines = [line for line in file.getvalue().splitlines() if line.startswith("validation")]
    shown = [line.split("  ")[1:] for line in lines[1:]]
    assert shown == [["val/accuracy 0.5000 (+0.2500)"], ["val/own 1.0000 (+0.5000)"]]


def test_colours_forced_upon_a_file_make_no_terminal_of_it() -> None:
    terminal, file = (Console(file=file, force_terminal=True) for file in (Terminal(), io.StringIO()))
    assert rewrites(terminal) and not rewrites(file)


def test_no_text_is_taken_for_an_emoji_or_a_style(capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts, responses and paths of users."""
    text = "a ratio of 1:100:3 in [b]/x[/y]"
    console().print(text)
    assert capsys.readouterr().out == f"{text}\n"
    file = Terminal()
    with Progress(Console(file=file, force_terminal=True, width=100), 3) as progress:
        progress.show_status(text)
    assert text in file.getvalue()


def test_a_change_is_of_what_was_measured_before() -> None:
    assert changes({"val/a": 0.5, "val/b": 2.0}, {"val/a": 0.75}) == "val/a 0.5000 (-0.2500)  val/b 2.0000"


def test_the_loss_on_answers_is_that_of_their_tokens() -> None:
    """Not its part of the batch's loss, which has their share and weight in it."""
    row = {"actor/supervised_loss": 0.25, "actor/cross_entropy": 1.75}
    line = Progress(Console(file=io.StringIO()), 10).line(1, row)
    assert "cross-entropy 1.7500" in line and "0.25" not in line


def test_what_rounds_to_zero_has_no_sign() -> None:
    assert changes({"val/reverse_kl": -1e-9}, {"val/reverse_kl": 1e-9}) == "val/reverse_kl 0.0000 (+0.0000)"
    assert changes({"val/reverse_kl": -1e-9}) == "val/reverse_kl 0.0000"


def test_the_table_of_a_run_fits_80_columns_and_tells_gpus_apart(capsys: pytest.CaptureFixture[str]) -> None:
    uuids = [f"GPU-8f2c1f3e-{n}000-1111-2222-123456789abc" for n in range(2)]
    groups = ("reward_model", "rollout")
    reports = [report(g, 15, n, uuid=uuids[n], node="192.168.100.100", pid=4194304) for n, g in enumerate(groups)]
    print_table(console(), placement_table(reports, narrow=True))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == ["reward_model", "15", "192.168.100.100", "4194304", "0", "GPU-8f2c1f3e-0"]
    assert lines[2].split()[-1] == "GPU-8f2c1f3e-1"


def test_output_that_is_replaced_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, and by a program that captures what one call prints."""
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", first)
    out = console(patient=True)
    first.close()
    monkeypatch.setattr(sys, "stdout", second)
    out.print("text")
    assert second.getvalue() == "text\n"


def test_a_closed_output_takes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    console(patient=True).print("text")


def test_a_log_on_a_disk_that_is_full_for_a_moment_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk(io.StringIO):
        error: OSError | None = OSError(errno.ENOSPC, "No space left on device")

        def flush(self) -> None:
            if self.error is not None:
                raise self.error

    disk = Disk()
    monkeypatch.setattr(sys, "stdout", disk)
    out = console(patient=True)
    out.print("full")
    disk.error = None
    out.print("later")
    assert disk.getvalue() == "full\nlater\n"
    disk.error = BrokenPipeError()
    with pytest.raises(BrokenPipeError):
        out.file.flush()
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space"):
        console().print("table")
