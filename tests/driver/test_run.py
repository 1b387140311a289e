"""What a run says before it loads anything."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from gkd.config import Config, load
from gkd.config.compose import compose
from gkd.config.doubts import doubts
from gkd.driver.checkpoints.checkpoint import RunState, SavedCheckpoint
from gkd.driver.run import (
    CPU_SPLIT,
    _check_memory,
    _fingerprint_served,
    _forget_after,
    _print_pace,
    _restore,
    _train_and_save,
    _with_offload,
    step_text,
)
from gkd.driver.validation.best import BestModel
from gkd.durable import DirectoryIdentity
from gkd.errors import ConfigError, SignalExit
from gkd.observability.report import read
from gkd.planning.sizes import SIZE_FIELDS, SIZES


def test_a_step_and_what_memory_depends_on() -> None:
    config = load(
        {
            "trainer": {"batch_size": 64},
            "rollout": {"n": 8, "max_response_length": 96},
            "data": {"max_prompt_length": 896},
            "actor": {"mini_batch_size": 200, "epochs": 2, "lora": {"r": 8, "quantize": "nf4"}},
        }
    )
    figures = ["64", "8", "512", "6", "896", "96", "8,192", "0.0002", "8"]
    assert re.findall(r"(?<![\w-])\d[\d.,]*\b", step_text(config, 992)) == figures
    assert "prompts up to 416 " in step_text(config, 512)  # of a model with so many positions
    assert step_text(config, 992).endswith("LoRA r=8 over nf4")
    plain = step_text(load({"actor": {"gradient_checkpointing": True, "offload_optimizer": True}}), 48)
    assert "64 samples, 1 update;" in plain
    one = step_text(load({"trainer": {"batch_size": 1}}), 48)
    assert "1 prompt x 1 = 1 sample," in one
    assert "gradient checkpointing" in plain and plain.rpartition(";")[2].strip().startswith("optimizer")
    assert "weights" in step_text(load({"actor": {"offload_weights": True}}), 48).rpartition(";")[2]


OWN_DATA = ["data.train_files=[a]", "data.val_files=[b]"]


@pytest.mark.parametrize("kind", ["qwen2", "smollm3"])
def test_offload_and_sizes_are_decided_for_models_of_types_that_are_not_known_as_well(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = dict(zip(SIZE_FIELDS, SIZES["Qwen2.5-3B"], strict=True)) | {"model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"GPU": 1.0}}])
    model = f"model.path={tmp_path}"
    teachers = [f"++teacher.models.{name}={tmp_path}" for name in "ab"]

    def decide(*settings: str, gib: float = 79.1) -> tuple[bool, dict[str, Any]]:
        config = compose([*settings, model, *OWN_DATA, "placement=single_gpu", "actor.max_tokens_per_micro_batch=4096"])
        groups = list(config.groups())
        reports = [SimpleNamespace(group=group, gpu_bytes=gib * 2**30, node_id="a") for group in groups]
        return _check_memory(config, SimpleNamespace(reports=reports, groups=groups))  # type: ignore[arg-type]

    offload, sizes = decide("+recipe=grpo", "data.answer_key=c")
    assert offload and sizes["rollout.max_num_seqs"] >= 128
    two = [f"{pool}.n_gpus_per_node=2" for pool in ("trainer", "rollout", "teacher")]
    assert decide("+recipe=on_policy_distill", *teachers, "data.teacher_key=k", *two, gib=39.4)[0]


@pytest.mark.parametrize(("gib", "fits"), [(79.1, False), (400.0, True)])
def test_where_nothing_is_sampled_ahead_that_was_to_be_is_warned_of(
    gib: float, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shape = dict(zip(SIZE_FIELDS, SIZES["Qwen2.5-3B"], strict=True)) | {"model_type": "qwen2"}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"GPU": 1.0}}])
    own = [f"model.path={tmp_path}", *OWN_DATA, "data.answer_key=c", "schedule.max_staleness=2"]
    config = compose(["+recipe=grpo", *own, "placement=single_gpu", "actor.max_tokens_per_micro_batch=4096"])
    reports = [SimpleNamespace(group=group, gpu_bytes=gib * 2**30, node_id="a") for group in config.groups()]
    decided = _with_offload(config, SimpleNamespace(reports=reports, groups=list(config.groups())))  # type: ignore[arg-type]
    assert decided.schedule.max_staleness == (2 if fits else 0)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (not fits)
    assert all("schedule.max_staleness=2" in line and "rollout.colocate_with=null" in line for line in warnings)


OWN_MODELS = ["model.path=x", "teacher.model.path=y", *OWN_DATA]
DATA = {"train_files": ["a"], "val_files": ["b"], "answer_key": "c"}


def own_models(name: str, lora: bool, lr: float | None = None) -> Config:
    """A run with models and data of one's own."""
    rewarded = {"rollout": {"n": 2}, "reward": {"functions": ["accuracy"]}} if name != "on_policy_distill" else {}
    actor = {"lr": lr, "lora": {"r": 8 if lora else None}}
    teacher = {} if rewarded else {"teacher": {"model": {"path": "x"}}}
    return load(
        {"algorithm": {"name": name}, "model": {"path": "x"}, "data": DATA, "actor": actor, **teacher, **rewarded}
    )


@pytest.mark.parametrize(
    ("name", "lora", "lr"),
    [
        ("on_policy_distill", False, 2e-5), ("on_policy_distill", True, 2e-4),
        ("grpo", False, 1e-6), ("grpo", True, 1e-5), ("gspo", False, 1e-6),
    ],
)  # fmt: skip
def test_a_learning_rate_fits_the_algorithm_and_the_adapter(name: str, lora: bool, lr: float) -> None:
    config = own_models(name, lora)
    assert config.actor.lr == lr
    assert f"learning rate {lr:g}" in step_text(config, 1280)
    assert not list(doubts(config))
    ((low,), (high,)) = (doubts(own_models(name, lora, rate)) for rate in (lr / 20, 0.05))
    assert f"actor.lr={lr / 20:g} " in low and "actor.lr=0.05 " in high
    assert f"({lr:g} unless set)" in low and f"({lr:g} unless set)" in high
    assert "\n" not in low + high


def test_a_learning_rate_that_is_set_stays() -> None:
    assert own_models("grpo", True, 3e-6).actor.lr == 3e-6
    assert not list(doubts(load({"actor": {"lr": 3e-3}})))  # the built-in task's models are made for it
    # Written out and read again, with another algorithm on top, it is still what was written.
    composed = compose(["+recipe=grpo", "+task=sort_digits", "actor.lr=null"])
    assert composed.actor.lr == 1e-6
    assert composed.model_dump()["actor"]["lr"] == 1e-6
    assert compose(["+recipe=on_policy_distill", *OWN_MODELS]).actor.lr == 2e-5


def test_importance_weights_are_on_where_engine_and_trainer_can_differ() -> None:
    def level(device: str, tree: dict[str, Any] | None = None) -> str | None:
        settings = {"algorithm": {"name": "grpo"}, "rollout": {"n": 2}, **(tree or {})}
        return load(settings).algorithm_on(device).importance_sampling.level

    assert level("cpu") is None  # float32: equal to what it was without
    assert level("cuda") == "token"
    assert level("cpu", {"model": {"dtype": "bfloat16"}}) == "token"
    assert level("cuda", {"model": {"dtype": "float32"}}) is None
    assert level("cpu", {"actor": {"lora": {"r": 4, "quantize": "nf4"}}}) == "token"
    assert level("cpu", {"actor": {"lora": {"r": 4, "dropout": 0.1}}}) == "token"
    for chosen in (None, "sequence"):
        assert level("cuda", {"algorithm": {"name": "grpo", "importance_sampling": {"level": chosen}}}) == chosen
    distilled = {"algorithm": {"name": "on_policy_distill"}, "rollout": {}}
    assert level("cuda", distilled) is None  # a divergence over the vocabulary is not sampled
    assert level("cuda", {"algorithm": {"loss": {"name": "sampled_reverse_kl"}}, "rollout": {}}) == "token"
    assert level("cuda", {"algorithm": {"kl": {"coef": 0.1}}, "rollout": {}}) == "token"


@pytest.mark.parametrize(("pace", "on_gpus", "line"), [
    ("the pace", True, "the pace; a split"), ("the pace", False, f"the pace; {CPU_SPLIT}"), ("", False, None)
])  # fmt: skip
def test_a_run_ends_with_its_pace_and_a_split(
    pace: str, on_gpus: bool, line: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("gkd.driver.run.find_faster_split", lambda *of_run: "a split")
    printed: list[str] = []
    log: Any = SimpleNamespace(
        timeline=SimpleNamespace(summary=lambda: pace), progress=SimpleNamespace(print_line=printed.append)
    )
    config = load({})
    _print_pace(config, tmp_path, log, config.rollout, on_gpus)
    assert printed == ([] if line is None else [line])


def restored(
    tmp_path: Path, state: RunState, total: int, log: dict[str, Any]
) -> tuple[RunState, list[str], dict[str, float]]:
    """What a run goes on with from a checkpoint, what was done for it, and what the next validation is held against."""
    done: list[str] = []

    def do(what: str, result: Any = None) -> Any:
        def call(*_: object) -> Any:
            done.append(what)
            return result

        return call

    sets = SimpleNamespace(sets=[], run=do("sets", {"val/hard/accuracy": 0.5}))
    parts: Any = SimpleNamespace(
        actor=SimpleNamespace(load_state=do("load")),
        prompts=SimpleNamespace(restore=do("prompts")),
        sync=SimpleNamespace(push=do("push")),
        validation=SimpleNamespace(run=do("validate", {"val/accuracy": 0.9})),
        val_sets=sets,
    )
    progress = SimpleNamespace(show_status=do("show"), print_line=do("show"), validated={})
    run_log: Any = SimpleNamespace(**{"best": None, "stop": None, "stops_early": False, **log}, progress=progress)
    saved = SavedCheckpoint(tmp_path / "step_5", "end", state, {}, "", "float32", {}, {})
    config = load({"trainer": {"total_steps": total}})
    went_on = _restore(config, parts, run_log, saved)
    return went_on, [what for what in done if what != "show"], progress.validated


STATE = RunState(step=5, before={"val/accuracy": 0.1}, validated={"val/accuracy": 0.2, "val/x": 1.0})


@pytest.mark.parametrize(
    ("row", "total", "early", "validates"),
    [(None, 6, False, False), (None, 5, False, True), (None, 9, True, True), ({"step": 5.0}, 5, False, False)],
)
def test_a_run_that_has_no_step_left_is_validated_as_its_results_were_lost(
    tmp_path: Path, row: dict[str, float] | None, total: int, early: bool, validates: bool
) -> None:
    """Where the last step's own validation is still to come (``row``), the loop does it."""
    state, done, held = restored(tmp_path, replace(STATE, row=row), total, {"stops_early": early})
    assert done == ["load", "prompts", "push", *(["validate", "sets"] if validates else [])]
    now = {"val/accuracy": 0.9, "val/hard/accuracy": 0.5} if validates else {}
    assert state.validated == held == {**STATE.validated, **now} and state.step == 5


def test_a_run_goes_on_with_the_served_teacher_that_it_had(tmp_path: Path) -> None:
    """Whose weights no file of the run's tells; an earlier checkpoint states none."""
    client: Any = SimpleNamespace(weights="1", on_change=None)
    data = {"train": "0"}
    saved = SavedCheckpoint(tmp_path / "step_5", "end", STATE, {}, "", "float32", data, {})
    assert _fingerprint_served(client, None) == _fingerprint_served(client, saved) == {"teacher.server_ip": "1"}
    data["teacher.server_ip"] = "2"
    with pytest.raises(ConfigError, match=r"teacher\.server_ip .*/step_5\b"):
        _fingerprint_served(client, saved)


def test_the_first_validation_of_a_run_that_goes_on_is_held_against_the_one_before_training(tmp_path: Path) -> None:
    """Where none was done in between."""
    assert restored(tmp_path, replace(STATE, validated={}), 9, {})[-1] == STATE.before


@pytest.mark.parametrize(("step", "row", "stays"), [(40, None, True), (45, None, False), (40, {"x": 1.0}, False)])
def test_a_best_student_of_steps_that_are_done_again_counts_no_more(
    tmp_path: Path, step: int, row: dict[str, float] | None, stays: bool
) -> None:
    """What best.json states is in metrics.jsonl; its student stays until the next validation writes another."""
    rows = [{"step": at, "val/accuracy": at / 100} for at in range(step + 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "best.json").write_text(json.dumps({"metric": "val/accuracy", "value": step / 100, "step": step}))
    (tmp_path / "best").mkdir()
    state = RunState(step=40, row=row)
    saved = SavedCheckpoint(tmp_path / "step_40", "end", state, {}, "", "float32", {}, {})
    assert _forget_after(saved, tmp_path) == 40
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (tmp_path / "best.json").exists() == stays == (last["step"] == step) and (tmp_path / "best").is_dir()
    assert BestModel("val/accuracy", DirectoryIdentity.of(tmp_path)).value == (0.4 if stays else None)


@pytest.mark.parametrize("fails", [None, "train", "save", "wait", "write_scores", "write"])
def test_a_run_is_finished_or_leaves_a_checkpoint(
    fails: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends it, up to its last file. Collections of garbage leave out what was there while it trains."""
    done: list[str] = []
    heap: list[str] = []

    @contextmanager
    def freeze() -> Iterator[None]:
        heap.append("frozen")
        try:
            yield
        finally:
            heap.append("as before")

    def train(*_: object) -> Any:
        assert heap == ["frozen"]
        return do("train", end)()

    def do(what: str, result: Any = None) -> Any:
        def call(*_: object) -> Any:
            done.append(what)
            if what == fails:
                raise SignalExit(signal.SIGTERM)
            return result

        return call

    end = replace(STATE, validated={"val/accuracy": 0.9})
    monkeypatch.setattr("gkd.driver.run._validate_before", lambda *_: STATE)
    monkeypatch.setattr("gkd.driver.run.train", train)
    monkeypatch.setattr("gkd.driver.run.freeze_heap_meanwhile", freeze)
    monkeypatch.setattr("gkd.driver.run.write_scores", do("write_scores"))
    if fails == "write":
        monkeypatch.setattr("gkd.observability.report.write", do("write"))
    parts: Any = SimpleNamespace(
        actor=SimpleNamespace(save=do("save")),
        validation=SimpleNamespace(scores={}),
        val_sets=SimpleNamespace(last_scores={}),
    )
    calls = {"settle": do("settle", tmp_path), "wait": do("wait"), "rescue": do("rescue")}
    metrics = SimpleNamespace(require_written=do("require_written"))
    log: Any = SimpleNamespace(checkpoints=SimpleNamespace(started=0.0, **calls), metrics=metrics)
    with pytest.raises(SignalExit) if fails else nullcontext():
        summary = _train_and_save(load({}), parts, log, None, tmp_path, 7)
        assert (summary.before, summary.after, summary.steps) == (STATE.before, end.validated, end.step)
        assert summary.n_val == 7 and summary.wall_s > 0 and summary == read(tmp_path)
    order = ["train", "settle", "save", "wait", "require_written", "write_scores", "write"]
    assert done == (order[:6] if fails is None else [*order[: order.index(fails) + 1], "rescue"])
    assert heap == ["frozen", "as before"]
    assert (tmp_path / "summary.json").exists() == (fails is None)
