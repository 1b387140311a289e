"""python -m gkd.plan as people use it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Qwen2Config

from gkd.cli.plan import compose_plan, main
from gkd.config import settings
from gkd.config.compose import compose
from gkd.config.device import GIB
from gkd.config.idle import find_idle
from gkd.config.loading import dump_yaml
from gkd.driver.inputs.find import find_inputs
from gkd.errors import ConfigError
from gkd.observability.metrics import JsonLines
from gkd.planning.layout import find_gpu_type, models_of
from gkd.planning.measured.factors import _spread
from gkd.planning.measured.timeline import find_disturbed_steps
from gkd.recipes.sort_digits.task import SortDigits, recipes
from gkd.recipes.sort_digits.warmup import new_model
from tests.error_text import contains_in_order
from tests.planning.layouts import DATA


def planned(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "plan.json"
    assert main([*arguments, "--json", str(out)]) in (0, 1)
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_a_plan_needs_no_data(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = planned(tmp_path, "+recipe=grpo", f"model.path={model}", "placement=8gpu")
    printed = capsys.readouterr().out
    actor, rollout = result["memory"]
    assert (actor["group"], rollout["group"], rollout["n_gpus"]) == ("actor", "rollout", 3)
    assert actor["items"]["weights"] == 4 * 1_543_714_304
    assert rollout["items"]["weights"] == 2 * 1_543_714_304
    assert actor["total"] == pytest.approx(sum(actor["items"].values()))
    assert [step["staleness"] for step in result["pipeline"]] == [0, 1, 2]
    for group in result["memory"]:
        assert f"{group['total'] / 1e9:.1f}" in printed
    assert f"{result['pipeline'][0]['seconds']:.2f}" in printed


def test_a_plan_states_what_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path, "+recipe=grpo", "model.size=0.5b")
    assert capsys.readouterr().out.startswith("grpo: ")
    planned(tmp_path)
    line, *_ = capsys.readouterr().out.splitlines()
    assert line.startswith("on_policy_distill (no +recipe ")


def test_memory_alone_is_that_of_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU here, too: the plan is whether the run fits on one of that size."""
    own = ["+recipe=grpo", "model.size=0.5b"]
    gpu = planned(tmp_path, *own, "plan.memory_gb=16")["hardware"]
    assert (gpu["is_cpu"], gpu["memory"]) == (False, 16e9)
    assert "rtx-3060 (plan.gpu_type), with 16.0 GB" in capsys.readouterr().out
    assert planned(tmp_path, *own, "plan.memory_gb=16", "plan.gpu_type=l4")["hardware"]["name"] == "l4"
    assert planned(tmp_path, *own, "plan.memory_gb=16", "placement=cpu")["hardware"]["is_cpu"]
    assert planned(tmp_path, *own)["hardware"]["is_cpu"]


@pytest.mark.parametrize("placement", ["auto", "single_gpu", "2gpu", "4gpu"])
def test_a_plan_of_a_cpu_says_so_and_how_a_gpu_is_planned(
    placement: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is one where a run here would compute on it; what the groups take together is no negative memory."""
    own = ["+recipe=grpo", "model.size=405b", f"placement={placement}"]
    result = planned(tmp_path, *own)
    printed = capsys.readouterr().out
    assert (
        result["hardware"]["is_cpu"]
        == (placement != "4gpu")
        == any("CPU" in n and "plan.gpu_type" in n for n in result["notes"])
    )
    if result["hardware"]["is_cpu"]:
        assert min(group["available"] for group in result["memory"]) < 0
    (there,) = [line for line in printed.splitlines() if line.startswith(" there is ")]
    assert "-" not in there
    assert not planned(tmp_path, *own, "plan.gpu_type=l4")["hardware"]["is_cpu"]


def test_a_gpu_here_of_an_unknown_type_has_its_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 is no H100: a plan for 79 GiB would promise what ends in out-of-memory."""
    monkeypatch.setattr("gkd.planning.layout.read_first_usable", lambda: ("Tesla T4", 15 * GIB))
    monkeypatch.setattr("gkd.cluster.gpu.nvml_uuids", lambda: ["GPU-1"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    hardware = planned(tmp_path, "+recipe=grpo", "model.size=0.5b")["hardware"]
    assert hardware["memory"] == pytest.approx(15 * GIB)
    assert contains_in_order(hardware["name"], "Tesla T4", "rtx-3060", "plan.gpu_type")
    assert planned(tmp_path, "+recipe=grpo", "model.size=0.5b", "plan.gpu_type=l4")["hardware"]["name"] == "l4"


def test_a_model_of_an_unknown_type_is_noted_whatever_it_is_for(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 99}
    for kind in ("strange", "odder"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps({**shape, "intermediate_size": 64, "model_type": kind}))
    models = [f"reference.model.path={tmp_path}/strange", f"reward_model.model.path={tmp_path}/odder"]
    own = ["+recipe=grpo", "model.size=0.5b", "algorithm.kl.coef=0.1", "reward.functions=[reward_model]"]
    notes = " ".join(planned(tmp_path, *own, *models)["notes"])
    assert contains_in_order(notes, "model_type odder", "model_type strange")


def test_what_changes_nothing_is_noted_as_a_run_warns_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, idle = ["+recipe=grpo", "model.size=0.5b", "placement=8gpu"], "teacher.max_num_seqs=4"
    lines = list(find_idle(compose_plan([*own, idle])))
    assert any(idle in line for line in lines) and any("8gpu" in line for line in lines)
    assert planned(tmp_path, *own, idle)["notes"][: len(lines)] == lines
    printed = capsys.readouterr().out
    assert all(f"note: {line}\n" in printed for line in lines)


def test_memory_alone_is_that_of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with one GPU, whose groups would share it, as well."""
    monkeypatch.setattr("gkd.cluster.gpu.nvml_uuids", lambda: ["GPU-1"])
    monkeypatch.setattr("gkd.planning.layout._gpu_here", lambda: ("h200", 150.0))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    own = ["+recipe=grpo", "model.size=0.5b"]
    here = planned(tmp_path, *own)
    assert here["hardware"]["name"] == "h200"
    assert _shared(here)
    other = planned(tmp_path, *own, "plan.memory_gb=16")
    assert other["hardware"]["memory"] == 16e9
    assert "rtx-3060" in other["hardware"]["name"]
    assert not _shared(other)
    named = planned(tmp_path, *own, "plan.memory_gb=16", "plan.nodes=[1]")  # a machine of one such GPU
    assert named["hardware"]["memory"] == 16e9 and _shared(named)


def _shared(result: dict[str, Any]) -> bool:
    """Whether a group has less than all of its GPU."""
    return any(group["available"] < result["hardware"]["memory"] for group in result["memory"])


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("{recipe: grpo, model: {size: 0.5b}}", []),
        ("{recipe: on_policy_distill, model: {size: 0.5b}, teacher: {model: {size: 7b}}}", []),
        ("{recipe: grpo, data: {train_files: [], val_files: [], answer_key: null}}", ["model.size=0.5b"]),
        ("{recipe: grpo}", ["model={size:0.5b}"]),
    ],
)
def test_a_plan_of_a_file_needs_no_data(text: str, overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert planned(tmp_path, str(tmp_path / "mine.yaml"), *overrides)["memory"]
    (tmp_path / "mine.yaml").write_text("{recipe: grpo, model: {size: 0.5b}, data: {train_files: [a], val_files: [b]}}")
    config = compose_plan([str(tmp_path / "mine.yaml")])
    assert (config.data.train_files, config.data.val_files) == (["a"], ["b"])


def test_what_a_run_refuses_is_not_offered(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["+recipe=grpo", f"model.path={model}", "plan.gpu_type=l40s", "--best", "4", "--by-memory"])
    named = set(re.findall(r"\b(?:[a-z]\w*\.)+[a-z]\w*\b", capsys.readouterr().out))
    assert "actor.lora.r" in named
    assert named <= set(settings())


def test_checkpointing_and_micro_batches_show_in_the_activations(model: str, tmp_path: Path) -> None:
    def activations(*overrides: str) -> float:
        result = planned(tmp_path, "+recipe=grpo", f"model.path={model}", "placement=8gpu", *overrides)
        value: float = result["memory"][0]["items"]["activations"]
        return value

    full = activations()
    assert activations("actor.gradient_checkpointing=true") < full / 4
    assert activations("actor.max_tokens_per_micro_batch=4096") == pytest.approx(full / 2)


def test_the_builtin_task_is_planned_by_the_shapes_it_makes() -> None:
    models = models_of(compose(["+recipe=on_policy_distill"]))
    teacher, student = recipes(SortDigits.Config(), 0)
    for recipe, shape in ((teacher, models.teacher), (student, models.student)):
        assert shape is not None
        assert shape.n_parameters == sum(p.numel() for p in new_model(recipe).parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["+recipe=on_policy_distill", "model.size=7b"], r"there is no teacher: name teacher.model.path, or teacher"),
        (["+recipe=grpo", "model.size=7q"], r"model.size=7q: "),
        (["+recipe=grpo", "model.size=0b"], r"model.size=0b: "),
        (["+recipe=grpo", "model.size=0.0m"], r"model.size=0.0m: "),
        (["+recipe=grpo", "model.size=7b", "--best", "many"], r"--best: many is not a number of GPUs"),
        (
            ["+recipe=grpo", "model.size=7b", "--best", "99999999"],
            r"--best: 99999999 is not a number of GPUs from 1 to",
        ),
        (["+recipe=grpo", "model.size=7b", "model.path=x"], r"path=x and size=7b exclude each other"),
        (["+recipe=grpo", "model.path=/nowhere/at/all"], r"model.path=/nowhere/at/all: no such directory"),
        (["+recipe=grpo", "model.size=7b", "plan.gpu_type=h20"], r"gpu_type=h20 is not known \(did you mean h200\?\)"),
        (["+recipe=grpo", "model.size=7b", "plan.gpu_type=h100"], r"gpu_type=h100 is not .* mean h100-80gb\?\)"),
        (
            ["+recipe=grpo", "model.size=7b", "--from", "/nowhere"],
            r"--from /nowhere/config.yaml: No such file",
        ),
        (
            ["+recipe=grpo", "model.size=7b", "plan.response_length=9999"],
            r"plan.response_length=9999 .*rollout.max_response_length=\d",
        ),
        (
            ["+recipe=grpo", "model.size=7b", "plan.prompt_length=9999"],
            r"plan.prompt_length=9999 .*data.max_prompt_length=\d",
        ),
        (["+recipe=grpo", "model.size=7b", "--best", "1"], r"--best 1: 2 groups need a GPU each"),
        (
            ["+recipe=grpo", "model.size=7b", "plan.gpus_per_node=100000000"],
            r"plan.gpus_per_node=100000000: .* or equal to 1024",
        ),
        (["+recipe=grpo", "model.size=7b", "plan.nodes=[8,0]"], r"plan.nodes.1=0: "),
        (["+recipe=grpo", "model.size=7b", "plan.nodes=[]"], r"plan.nodes=\[\]: "),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error


@pytest.mark.parametrize(
    "own", ["rollout.max_response_length=1024", "rollout.max_response_length=1000 plan.prompt_length=25"]
)
def test_lengths_beyond_the_positions_are_refused(own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, positions in (("short", 1024), ("long", 4096)):
        config = Qwen2Config(max_position_embeddings=positions, num_hidden_layers=1, hidden_size=64)
        config.save_pretrained(tmp_path / name)
    for student, teacher in (("short", "long"), ("long", "short")):
        models = [f"model.path={tmp_path / student}", f"teacher.model.path={tmp_path / teacher}"]
        assert main(["+recipe=on_policy_distill", *models, *own.split()]) == 2
        named = "student" if student == "short" else "teacher"
        *_, error = capsys.readouterr().err.splitlines()
        assert contains_in_order(error, own.split(maxsplit=1)[0], named, 1024)


def test_of_several_teachers_the_largest_is_planned_and_the_shortest_ends_texts(tmp_path: Path) -> None:
    for name, positions, hidden in (("student", 4096, 64), ("small", 1024, 64), ("large", 4096, 128)):
        config = Qwen2Config(max_position_embeddings=positions, num_hidden_layers=1, hidden_size=hidden)
        config.save_pretrained(tmp_path / name)
    teachers = [f"teacher.models.{name}={tmp_path / name}" for name in ("small", "large")]
    several = ["data.teacher_key=k", "teacher.n_gpus_per_node=2", "data.max_prompt_length=2000"]
    own = ["+recipe=on_policy_distill", f"model.path={tmp_path / 'student'}", "plan.gpu_type=l4"]
    result = planned(tmp_path, *own, *teachers, *several)
    alone = planned(tmp_path, *own, f"teacher.model.path={tmp_path / 'large'}", "data.max_prompt_length=768")
    assert result["workload"]["longest"] == alone["workload"]["longest"] == 1024
    weights = [[g["items"]["weights"] for g in plan["memory"] if g["group"] == "teacher"] for plan in (result, alone)]
    assert weights[0] == weights[1]
    assert any("large" in note for note in result["notes"])


def test_models_to_evaluate_are_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["+recipe=grpo", "models.base=/tmp/none", "+sets=gsm8k"]) == 2
    assert contains_in_order(capsys.readouterr().err, "models.*", "gkd evaluate")


def test_a_run_refuses_a_size_without_a_model() -> None:
    config = compose([*DATA, "+recipe=grpo", "model.size=7b"])
    with pytest.raises(ConfigError, match=r"model\.size=7b .*model\.path"):
        find_inputs(config, print)


@pytest.mark.parametrize("dynamic", [False, True])
def test_timings_of_an_earlier_run_are_taken(dynamic: bool, model: str, tmp_path: Path) -> None:
    """Of the same layout they are its own; of another one they scale with the estimate.

    Tokens are of all samples, also of those that dynamic sampling left out.
    """
    run = tmp_path / "run"
    run.mkdir()
    overrides = ["+recipe=grpo", f"model.path={model}", "placement=8gpu", "data.max_prompt_length=200"]
    config = compose([*DATA, *overrides])
    (run / "config.yaml").write_text(dump_yaml(config))
    many = {"reward/groups": 2.0 * config.trainer.batch_size} if dynamic else {}
    with JsonLines(run / "metrics.jsonl") as log:
        log.write({"step": 0, "epoch": 0, "val/accuracy": 0.1})
        for step, update in ((1, 99.0), (2, 7.0), (3, 7.0)):
            log.write(
                {
                    "step": step, "timing_s/generate": 3.0, "timing_s/score": 0.0, "timing_s/update": update,
                    "timing_s/sync": 0.5, "timing_s/step": 10.5, "response/length_mean": 100.0,
                    "perf/tokens_per_second": (1 + dynamic) * 512 * 150 / 10.5, **many,
                }
            )  # fmt: skip
    result = planned(tmp_path, *overrides, "--from", str(run))
    assert (result["workload"]["prompt"], result["workload"]["response"]) == (50, 100)
    assert result["stages"]["generate"] == pytest.approx(3.0)
    assert result["stages"]["update"] == pytest.approx(7.0)
    assert result["stages"]["sync"] == pytest.approx(0.5)
    steps = {step["staleness"]: step["seconds"] for step in result["pipeline"]}
    assert steps[0] == pytest.approx(3.0 + 7.0 + 0.5, rel=0.1)  # less what streaming hides
    wider = planned(tmp_path, *overrides, "--from", str(run), "trainer.n_gpus_per_node=2")
    assert 3.0 < wider["stages"]["update"] < 4.5


@pytest.mark.parametrize(("clip_ratio", "limit"), [(0.0, 1e9), (0.05, 1640.0)])
def test_the_spread_of_a_runs_lengths_is_found(clip_ratio: float, limit: float) -> None:
    """Of 512 lognormal lengths a step with a spread of 0.6: from their longest, or from how many reach the limit."""
    config = compose([*DATA, "+recipe=grpo", "model.size=7b", "trainer.batch_size=128", "rollout.n=4"])
    rng, rows = np.random.default_rng(0), []
    for _ in range(20):
        lengths = np.minimum(rng.lognormal(6.2, 0.6, 512), limit)
        rows.append({"response/length_mean": lengths.mean(), "response/length_max": lengths.max(),
                     "response/clip_ratio": float((lengths == limit).mean())})  # fmt: skip
    assert (rows[0]["response/clip_ratio"] > 0) == (clip_ratio > 0)
    assert _spread(config, rows) == pytest.approx(0.6, rel=0.15)


ROW = '{"step": 1, "timing_s/update": 1.0, "timing_s/generate": 1.0, "timing_s/sync": 1.0}'


@pytest.mark.parametrize(
    ("config", "metrics", "message"),
    [
        ("a: [", ROW, "config.yaml cannot be read"),
        ("[1, 2]", ROW, "config.yaml is no configuration"),
        ("a: ${nothing}", ROW, "config.yaml cannot be read|unknown setting a"),
        (
            "model: {path: /gone}\ndata: {train_files: [a], val_files: [a]}\nteacher: {model: {path: /t}}",
            ROW,
            "--from .*: model.path=/gone: ",
        ),
        ("schedule: {max_staleness: x}", ROW, r"--from .*config.yaml: schedule.max_staleness=x: "),
        ("recipe: grpo", "{", "metrics.jsonl line 1 cannot be read"),
        ("recipe: grpo", "[1]", "metrics.jsonl line 1 cannot be read"),
        ("recipe: grpo", ROW.replace("1.0", '"x"'), "has a timing_s/update that is no number"),
    ],
)
def test_what_is_no_run_is_one_line(
    config: str, metrics: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "metrics.jsonl").write_text(metrics + "\n")
    assert main(["+recipe=grpo", "model.size=7b", "--from", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("placement.json", "[" * 100_000, "deep"),
        ("timeline.json", '{"traceEvents":' * 100_000, "deep"),
        ("timeline.json", '{"traceEvents": [{"ph": "X", "cat": "busy", "pid": 1e400}]}', "1e400"),
        ("samples.jsonl", "[" * 100_000 + "\n", "deep"),
    ],
)
def test_a_damaged_file_of_a_run_is_one_line(
    name: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(dump_yaml(compose(["+recipe=grpo"])))
    (tmp_path / "metrics.jsonl").write_text(ROW + "\n")
    (tmp_path / name).write_text(content)
    assert main(["+recipe=grpo", "--from", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line and message in line


def test_a_disturbance_whose_step_is_no_number_is_of_no_step(tmp_path: Path) -> None:
    events = [{"kind": "death", "step": step} for step in (3, "x", None, [])] + [{"kind": "death"}, {"step": 4}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert find_disturbed_steps(tmp_path) == {3}


@pytest.mark.parametrize(
    ("name", "gib", "gpu_type"),
    [
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", 79.6, "h100-80gb"),
        ("NVIDIA H100 PCIe", 79.6, "h100-pcie"),
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx-4090"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA T4", 14.6, None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9.5, None),
    ],
)
def test_drivers_names_are_known(name: str, gib: float, gpu_type: str | None) -> None:
    assert find_gpu_type(name, gib) == gpu_type
