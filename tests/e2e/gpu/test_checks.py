"""The checks of the acceptance run, given what such runs would have left: they see what is wrong."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gkd.cluster.workers.activity import memory_here
from gkd.config.compose import compose
from gkd.driver.checkpoints.checkpoint import RunState, SavedCheckpoint, write
from gkd.durable import Checksum
from gkd.rollout.worker import RolloutWorker
from tests.benchmarks import loss
from tests.gpu.checks import loss as losses
from tests.gpu.checks import mps, phases, runs, w1
from tests.gpu.checks.context import Context, Skipped
from tests.gpu.checks.program import Run, require_room


def test_the_comparison_of_attentions_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arithmetic, on the CPU, where both sides are padded: rounding to bfloat16 passes, a wrong window does not."""
    from gkd.modeling import attention
    from tests.gpu.checks.attention import MOST, difference

    lengths = (1, 40, 7)
    assert 1e-4 < difference(4, 2, 16, 9, 16, "cpu", lengths) < MOST
    assert 1e-4 < difference(4, 4, 24, None, 16, "cpu", lengths, 5) < MOST
    plain = attention._attend_padded

    def wrong(q, k, v, scale, window, bounds):
        return plain(q, k, v, scale, window if q.dtype.itemsize == 4 else window + 1, bounds)

    monkeypatch.setattr(attention, "_attend_padded", wrong)
    assert difference(4, 2, 16, 9, 16, "cpu", lengths) > MOST


@dataclass
class Recorded:
    """In place of whole programs: checks their overrides and gives what such a run would have left."""

    mismatch: float = 0.001
    peak_gb: float = 30.0
    grad_norm: float = 1.0
    weights: bytes = b"weights"
    phases: tuple[str, ...] = phases.PHASES
    phase_figures: tuple[str, ...] = ("allocated_gb", "free_gb")
    names: list[str] = field(default_factory=list)

    def __call__(
        self,
        context: Context,
        name: str,
        *overrides: str,
        recipe: str = "on_policy_distill",
        program: tuple[str, ...] = ("gkd.main",),
    ) -> Run:
        self.names.append(name)
        if program[0] == phases.__name__:
            rows = [
                {"phase": phase, "worker": "actor 0", **dict.fromkeys(self.phase_figures, gb)}
                for phase in self.phases
                for gb in (5, 4)
            ]
            Path(program[1]).write_text("".join(json.dumps(row) + "\n" for row in rows))
        require_room(max(1, context.n_gpus), *overrides, recipe=recipe)
        config = compose([f"+recipe={recipe}", *overrides])
        output = context.scratch / name
        for directory in ("checkpoints/step_4/actor", "model/adapter"):
            (output / directory).mkdir(parents=True)
        rank = output / "checkpoints" / "step_4" / "actor" / "rank_0.safetensors"
        rank.write_bytes(self.weights)
        files = {"actor/rank_0.safetensors": Checksum(7, hashlib.sha256(b"weights").hexdigest())}
        write(SavedCheckpoint(rank.parents[1], "step", RunState(4), {}, "", "bfloat16", {}, files))
        steps = [{"step": i, "distill/loss": 2 - i / 10, "mismatch/kl": self.mismatch, "timing_s/step": 2.5,
                  "staleness/max": float(config.schedule.max_staleness), "actor/grad_norm": self.grad_norm,
                  **{f"timing_s/{stage}": 0.5 for stage in ("generate", "score", "update", "sync")},
                  "memory/actor/peak_gb": self.peak_gb} for i in range(1, config.trainer.total_steps + 1)]  # fmt: skip
        (output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
        accuracy = {"before": {"val/accuracy": 0.2}, "after": {"val/accuracy": 0.9}, "teacher": {"val/accuracy": 0.95}}
        (output / "summary.json").write_text(json.dumps({**accuracy, "wall_s": 30.0}))
        ways = {
            "nccl": "by nccl (",
            "object_store": "by object_store (",
            "nccl_m2n": "by nccl_m2n (",
            "sharded_rdt": "by sharded_rdt (",
            "colocation": "colocated: the actor is offloaded",
        }
        text = ways.get(name, "by ipc (")
        output.with_suffix(".txt").write_text(text)
        return Run(output, text, steps, 40.0, 60.0)


RUNS = ("eager", "graphs", "ahead", "colocation", "transfers", "little_memory", "host_weights", "curve", "two_gpus")
RUNS += ("against_trl",)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    runner = Recorded()
    monkeypatch.setattr(runs, "run", runner)
    monkeypatch.setattr(w1, "run", runner)
    monkeypatch.setattr(w1, "SHAPES", w1.SMALL)
    monkeypatch.setattr(w1, "WORDS", 512)
    return runner


def check(name: str, n_gpus: int, path: Path) -> dict[str, object]:
    """Run one in this process; returns its figures."""
    path.mkdir(exist_ok=True)
    context = Context(n_gpus, path, path / "result.json")
    getattr(w1 if name == "against_trl" else runs, name)(context)
    return context.figures


def test_every_run_is_one_that_can_be_configured(recorded: Recorded, tmp_path: Path) -> None:
    for name in RUNS:
        assert check(name, 2, tmp_path / name)
    assert recorded.names == [
        "eager", "graphs", "ahead", "colocation", "ipc", "object_store", "grpo", "host_weights", "curve",
        "nccl", "both", "w1",
    ]  # fmt: skip


@pytest.mark.parametrize("n_gpus", [2, 3])
def test_shards_go_by_each_way_that_is_installed(
    n_gpus: int, recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gkd.weights.shards.is_installed", lambda module: False)
    with pytest.raises(Skipped, match=r"nccl_m2n: .*nccl-extensions.*; sharded_rdt: .*\bnixl"):
        check("shards", n_gpus, tmp_path / "none")
    monkeypatch.setattr("gkd.weights.shards.is_installed", lambda module: module == "nixl._api")
    assert set(check("shards", n_gpus, tmp_path / "one")["lacking"]) == {"nccl_m2n"}
    monkeypatch.setattr("gkd.weights.shards.is_installed", lambda module: True)
    assert check("shards", n_gpus, tmp_path / "both")["lacking"] == {}
    assert recorded.names == ["sharded_rdt", "nccl_m2n", "sharded_rdt"]


def test_mps_runs_for_one_run_of_two(recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control, commands = tmp_path / mps.CONTROL, tmp_path / "asked"
    control.write_text(f'#!/bin/sh\nread line\necho "$1$line $CUDA_MPS_PIPE_DIRECTORY" >> {commands}\n')
    monkeypatch.setenv("PATH", str(tmp_path))
    context = Context(1, tmp_path, tmp_path / "result.json")
    with pytest.raises(Skipped, match="came without"):
        mps.beside_each_other(context)
    control.chmod(0o755)
    mps.beside_each_other(context)
    place = tmp_path / "mps"
    assert commands.read_text().splitlines() == [f"{what} {place}" for what in ("-d", "get_server_list", "quit -t 5")]
    assert recorded.names == ["with_mps", "without_mps"]
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert context.figures["ratio"] == 1.0
    control.write_text("#!/bin/sh\necho no permission; exit 1\n")
    place.rename(tmp_path / "before")
    with pytest.raises(Skipped, match="nvidia-cuda-mps-control -d: no permission"):
        mps.beside_each_other(context)


def test_losses_are_compared_with_those_of_the_run_before(recorded: Recorded, tmp_path: Path) -> None:
    for name in ("eager", "transfers"):
        check(name, 1, tmp_path)
    assert recorded.names == ["eager", "object_store"]


@pytest.mark.parametrize("name", ["graphs", "ahead", "little_memory", "host_weights", "two_gpus", "against_trl"])
def test_a_sampler_that_has_other_weights_than_the_trainer_fails_every_run(
    name: str, recorded: Recorded, tmp_path: Path
) -> None:
    recorded.mismatch = 0.3
    with pytest.raises(AssertionError, match=r"mismatch/kl|disagree"):
        check(name, 2, tmp_path)


def test_a_damaged_checkpoint_fails_colocation(recorded: Recorded, tmp_path: Path) -> None:
    recorded.weights = b"wrights"
    with pytest.raises(AssertionError, match=r"checkpoint .*sum differs"):
        check("colocation", 1, tmp_path)


def test_colocation_has_the_memory_after_each_phase(recorded: Recorded, tmp_path: Path) -> None:
    noted = check("colocation", 1, tmp_path / "all")["phases"]
    figures = {name: [5.0, 4.0] for name in recorded.phase_figures}
    assert noted == {f"{phase}, actor 0": figures for phase in phases.PHASES}
    recorded.phases = ("offload", "onload", "sleep", "wake", "push")
    with pytest.raises(AssertionError, match="wake weights"):
        check("colocation", 1, tmp_path / "one lacks")


def test_colocation_has_the_memory_on_the_gpu(recorded: Recorded, tmp_path: Path) -> None:
    recorded.phase_figures = ("process_gb",)
    check("colocation", 0, tmp_path / "rehearsal")
    with pytest.raises(AssertionError, match=r"GPU .*sleep, actor 0"):
        check("colocation", 1, tmp_path / "gpu")


def test_the_memory_of_an_engine_is_that_of_the_processes_in_which_it_computes() -> None:
    """Which only the thread of its loop may call; the worker's own process has none on a GPU."""
    in_loop: list[bool] = []

    def call(run: Callable[[], object], activity: str) -> object:
        in_loop.append(True)
        result = run()
        in_loop.pop()
        return result

    def call_processes(function: Callable[[], object]) -> list[object]:
        assert in_loop
        return [{"process_gb": 2.0, "allocated_gb": 5.0}] if function is memory_here else [(7_000_000_000, 80 << 30)]

    rollout = RolloutWorker.__new__(RolloutWorker)
    rollout.engine, rollout.loop = SimpleNamespace(call_processes=call_processes), SimpleNamespace(call=call)
    noted = phases.measure_memory(SimpleNamespace(_object=rollout))
    assert noted["process_gb"] > 2 and noted["allocated_gb"] == 5 and noted["free_gb"] == 7
    assert phases.measure_memory(SimpleNamespace(_object=object())).keys() == {"process_gb"}


def test_each_phase_is_measured_in_its_workers_once_it_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep: list[bool] = []
    call = SimpleNamespace(remote=lambda function: {"free_gb": float(asleep[-1]), "host": function.__name__})
    group = SimpleNamespace(name="rollout", workers=(SimpleNamespace(__ray_call__=call),) * 2)
    monkeypatch.setattr("ray.get", lambda values, timeout: values)
    sleep, wake = (
        phases._noting(lambda self, *_, value=value: asleep.append(value), name, lambda _: [group], tmp_path / "file")
        for name, value in (("sleep", True), ("wake", False))
    )
    sleep(None)
    wake(None, True)
    wake(None)
    rows = [json.loads(line) for line in (tmp_path / "file").read_text().splitlines()]
    assert {row["host"] for row in rows} == {"measure_memory"}
    assert [(row["phase"], row["worker"], row["free_gb"]) for row in rows] == [
        (phase, f"rollout {rank}", free)
        for phase, free in (("sleep", 1.0), ("wake weights", 0.0), ("wake", 0.0))
        for rank in (0, 1)
    ]


def test_runs_whose_weights_went_the_same_way_are_not_compared(recorded: Recorded, tmp_path: Path) -> None:
    check("eager", 1, tmp_path)
    (tmp_path / "eager.txt").write_text("weights go by object_store (weights.transfer=auto)")
    with pytest.raises(AssertionError, match=r"eager .*\bipc"):
        check("transfers", 1, tmp_path)


def test_more_memory_than_the_peer_fails_w1(recorded: Recorded, tmp_path: Path) -> None:
    recorded.peak_gb = 80.0
    with pytest.raises(AssertionError, match=r"74\.5 GiB .*64\.8"):
        check("against_trl", 1, tmp_path)


def test_w1_notes_what_it_is_of_its_goals_and_fails_for_none(recorded: Recorded, tmp_path: Path) -> None:
    recorded.peak_gb = 60.0
    figures = check("against_trl", 1, tmp_path)
    assert figures["goal_step_s"] == 2.6 and figures["goal_peak_gib"] == 40
    assert figures["step_of_goal"] == pytest.approx(2.5 / 2.6, rel=1e-3)
    assert figures["peak_of_goal"] == pytest.approx(60e9 / 2**30 / 40, rel=1e-3)


def test_the_loss_is_noted_beside_its_goals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is the sum over positions: its gradient's norm is that of autograd."""
    shape, cpu = loss.Shape(40, 64, 16, 8, 16), torch.device("cpu")
    one, other = (loss.measure(way, "jsd", shape, cpu)["norm"] for way in ("one pass", "autograd"))
    assert one == pytest.approx(other, rel=1e-4)
    measured: list[tuple[loss.Shape, str]] = []

    def measure(way: str, name: str, shape: loss.Shape, device: torch.device) -> dict[str, float]:
        measured.append((shape, device.type))
        return {"seconds": 0.1214, "bytes": 2e9}

    monkeypatch.setattr(losses, "measure", measure)
    context = Context(1, tmp_path, tmp_path / "result.json")
    losses.note_losses(context)
    assert {(shape.positions, shape.vocabulary, device) for shape, device in measured} == {(8192, 128_000, "cuda")}
    expected = {"jsd_ms": 121.4, "jsd_peak_gib": 2e9 / 2**30, "jsd_ms_of_goal": 2.0, "jsd_peak_of_goal": 0.5}
    assert {name: context.figures[name] for name in expected} == pytest.approx(expected, rel=1e-3)
