"""The first command of README.md, from the script to the table at its end."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gkd.config.compose import compose
from gkd.config.loading import read_run
from gkd.data.model_info import fingerprint_weights
from gkd.driver.checkpoints import checkpoint
from gkd.version import __version__
from tests.e2e.conftest import ROOT, SMALL, environment
from tests.e2e.on_a_cluster.conftest import free_port
from tests.error_text import contains_in_order

STEPS = 30
ALWAYS = {
    "timing_s/step", "timing_s/generate", "timing_s/score", "timing_s/update", "timing_s/sync", "timing_s/wait",
    "actor/loss", "actor/grad_norm", "actor/lr", "actor/entropy",
    "distill/loss", "distill/forward_kl", "distill/reverse_kl", "distill/teacher_mass", "distill/student_mass",
    "response/length_mean", "response/length_max", "response/clip_ratio", "staleness/mean", "staleness/max",
    "mismatch/kl", "mismatch/is_ratio_mean", "mismatch/is_ratio_max",
    "perf/tokens_per_second", "perf/tokens_per_second_per_gpu", "step", "epoch",
    "perf/busy/actor", "perf/busy/rollout", "perf/busy/teacher",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Path, str]:
    """Output directory and output of ./launch/quickstart.sh on the small task."""
    output = tmp_path_factory.mktemp("quickstart") / "run"
    temporary = output.with_name("tmp")
    temporary.mkdir()
    command = ["./launch/quickstart.sh", *SMALL, f"data.cache_dir={cache}", f"trainer.output_dir={output}"]
    command += [f"trainer.total_steps={STEPS}", "trainer.val_every=15", "actor.lr=3e-3"]
    variables = {**environment(), "TMPDIR": str(temporary)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return output, done.stdout


def rows(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_the_student_learns_from_the_teacher(finished: tuple[Path, str]) -> None:
    summary = json.loads((finished[0] / "summary.json").read_text())
    before, after, teacher = summary["before"], summary["after"], summary["teacher"]
    assert teacher["val/accuracy"] > 0.9
    assert before["val/accuracy"] <= 0.5 * teacher["val/accuracy"]
    assert after["val/accuracy"] >= before["val/accuracy"] + 0.3
    assert after["val/reverse_kl"] <= 0.4 * before["val/reverse_kl"]
    assert summary["steps"] == STEPS
    assert summary["wall_s"] > 0


def test_every_step_is_logged_once_with_every_metric(finished: tuple[Path, str]) -> None:
    metrics = rows(finished[0])
    assert [row["step"] for row in metrics] == list(range(STEPS + 1))
    for row in metrics[1:]:
        assert row.keys() >= ALWAYS, ALWAYS - row.keys()
        assert all(math.isfinite(value) for value in row.values())
        assert row["distill/teacher_mass"] == pytest.approx(1.0, abs=1e-4)  # the full vocabulary
        assert abs(row["mismatch/kl"]) < 1e-4  # sampler and trainer are one model: weights arrive every step
        assert row["staleness/max"] == 0
    assert [row["step"] for row in metrics if "val/accuracy" in row] == [0, 15, STEPS]
    assert metrics[0]["val/reverse_kl"] > 0


def test_what_a_run_leaves(finished: tuple[Path, str]) -> None:
    output = finished[0]
    assert [p.name for p in output.with_name("tmp").iterdir() if not p.name.startswith("torchinductor_")] == []
    placement = json.loads((output / "placement.json").read_text())
    assert [(row["group"], row["rank"], row["ray_gpu_ids"]) for row in placement] == [
        ("actor", 0, ["0"]),
        ("rollout", 0, ["1"]),
        ("teacher", 0, ["2"]),
    ]
    assert len({uuid for row in placement for uuid in row["gpu_uuids"]}) == 3
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    assert {s["version"] for s in samples if s["step"] == 7} == {6}  # sampled with the weights of the step before
    assert all({"prompt", "response", "answer", "teacher_logprob_mean"} <= s.keys() for s in samples)
    for tokens in (sample["tokens"] for sample in samples):
        assert len(tokens["text"]) == len(tokens["student"]) == len(tokens["teacher"]) == len(tokens["top"])
        for text, logprob, top in zip(tokens["text"], tokens["teacher"], tokens["top"], strict=True):
            likely = [p for _, p in top]
            assert likely == sorted(likely, reverse=True) and logprob <= likely[0]
            assert dict(top).get(text, logprob) == logprob
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "validation"] == [0, 15, STEPS]
    assert [events[0]["kind"], events[-1]["kind"], events[-1]["failed"]] == ["start", "end", False]
    trace = json.loads((output / "timeline.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in trace if e["ph"] == "M"} == {
        "driver", "driver 0", "validation", "actor 0", "rollout 0", "teacher 0",
    }  # fmt: skip
    last = {e["name"] for e in trace if e["ph"] == "X" and e["args"]["step"] == STEPS}
    assert last >= {"sample", "score", "update", "load weights", "generate", "waits-for-batch", "waits-for-weights"}
    assert last >= {"request", "log", "prepare", "log samples"}  # of the driver's own process
    assert (output / "config.yaml").read_text().startswith(f"# gkd {__version__}\n")
    assert json.loads((output / "summary.json").read_text())["version"] == __version__
    config = compose([str(output / "config.yaml")])
    assert config.trainer.total_steps == STEPS
    ran = read_run(output / "config.yaml")
    assert [(its.weights.transfer, its.cluster.offload) for its in (config, ran)] == [
        ("auto", "auto"),
        ("object_store", False),
    ]  # as requested, and as the run decided


def test_the_saved_student_answers_as_validated(finished: tuple[Path, str]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(finished[0] / "model")
    tokenizer = AutoTokenizer.from_pretrained(finished[0] / "model")
    right, questions = 0, [(a, b, c) for a in range(4) for b in range(5, 9) for c in range(2, 5)]
    for digits in questions:
        ids = tokenizer(" ".join(map(str, digits)) + " =", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        right += tokenizer.decode(out, skip_special_tokens=True) == " ".join(map(str, sorted(digits)))
    summary = json.loads((finished[0] / "summary.json").read_text())
    assert abs(right / len(questions) - summary["after"]["val/accuracy"]) < 0.25


def test_what_it_prints(finished: tuple[Path, str]) -> None:
    text = finished[1]
    assert "before training" in text
    assert re.search(r"\bpace\b[^;]*?\b(actor|rollout|teacher)\b", text)
    assert f"step {STEPS}/{STEPS}" in text
    assert "tok/s" in text
    assert "left" in text
    assert f"its report: {finished[0]}/report.html" in text and (finished[0] / "report.html").exists()
    assert re.search(rf"^validation .*\b{STEPS}  .*val/accuracy \d\.\d+ \([+-]", text, re.MULTILINE)
    assert str(finished[0]) in text
    assert "data.train_files=[train.jsonl]" in text  # the command to try next, brackets and all
    assert max(map(len, text.splitlines())) < 400


def test_the_test_script_runs_the_fast_tier_and_passes_arguments_on() -> None:
    done = subprocess.run(
        ["./launch/test.sh", "--collect-only", "-q", "tests/config", "tests/e2e/config"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checks passed" in done.stdout  # ruff
    assert "tests/config/test_config.py" in done.stdout
    assert "tests/e2e/config/test_imports.py" in done.stdout  # of a slow tier, but named
    assert "issues found" not in done.stdout  # mypy is for --all
    assert "installing" not in done.stdout  # a second start installs nothing


def test_an_external_teacher_serves_a_run(finished: tuple[Path, str], cache: Path, tmp_path: Path) -> None:
    """gkd.teacher.serve with a key on one side, a run with own models and data on the other.

    The teacher has a chat template of its own, and scores what that makes of the data's messages.
    """
    student, teacher, data = with_templates(cache, tmp_path)
    port = free_port()
    shared = [f"teacher.server_port={port}", f"teacher.key_file={tmp_path / 'key'}"]
    server = subprocess.Popen(
        [sys.executable, "-m", "gkd.teacher.serve", f"teacher.model.path={teacher}", *shared,
         "teacher.max_model_len=128"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    watchdog = threading.Timer(300, server.kill)  # ends the wait for its line, should it never come
    watchdog.start()
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert contains_in_order(line, f"tcp://127.0.0.1:{port}: {teacher}", "K"), line
        command = [sys.executable, "-m", "gkd.main", "+recipe=on_policy_distill", f"model.path={student}", *shared]
        command += ["teacher.server_ip=127.0.0.1", f"data.train_files=[{data / 'train.jsonl'}]"]
        command += [f"data.val_files=[{data / 'val.jsonl'}]", "data.answer_key=answer", "data.val_limit=32"]
        command += ["teacher.chat_template=own", "trainer.n_logged_samples=8"]
        command += ["rollout.max_response_length=8", "trainer.total_steps=2", "trainer.batch_size=8"]
        command += ["rollout.engine=hf", f"trainer.output_dir={tmp_path / 'run'}", "trainer.save_every=2"]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=200, env=environment(), check=False
        )
    finally:
        watchdog.cancel()
        server.terminate()
        printed, errors = server.communicate(timeout=30)
    assert done.returncode == 0, done.stderr
    assert server.returncode == 0, errors
    assert printed == ""
    assert "Traceback" not in errors
    placement = json.loads((tmp_path / "run" / "placement.json").read_text())
    assert [row["group"] for row in placement] == ["actor", "rollout"]  # no pool for a teacher that is elsewhere
    saved = checkpoint.read(tmp_path / "run" / "checkpoints" / "step_2")
    assert saved.data["teacher.server_ip"] == fingerprint_weights(teacher)
    assert {"val/reverse_kl", "val/accuracy"} == set(
        json.loads((tmp_path / "run" / "summary.json").read_text())["after"]
    )
    assert rows(tmp_path / "run")[-1]["distill/reverse_kl"] > 0
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    own, students = (mean_logprobs(teacher, template, samples) for template in (TEACHERS_TEMPLATE, STUDENTS_TEMPLATE))
    logprobs = [row["teacher_logprob_mean"] for row in samples]
    # The text of a response lacks the special tokens that a barely trained student puts into some.
    assert agreeing(logprobs, own) > 0.25 > agreeing(logprobs, students)


def agreeing(values: list[float], expected: list[float]) -> float:
    """Share of numbers that are the same."""
    return sum(abs(a - b) < 1e-3 for a, b in zip(values, expected, strict=True)) / len(values)


STUDENTS_TEMPLATE = "{{ bos_token }} {{ messages[0]['content'] }}"
TEACHERS_TEMPLATE = "{{ bos_token }} = = {{ messages[0]['content'] }}"


def with_templates(cache: Path, directory: Path) -> tuple[Path, Path, Path]:
    """The built-in task's student and teacher with different chat templates, and its data as messages."""
    (data,) = (d for d in cache.glob("sorting-data-*") if d.is_dir())
    (directory / "data").mkdir()
    for file in ("train.jsonl", "val.jsonl"):
        questions = [json.loads(line) for line in (data / file).read_text().splitlines()]
        for row in questions:
            row["messages"] = [{"role": "user", "content": row.pop("prompt")}]
        (directory / "data" / file).write_text("".join(json.dumps(row) + "\n" for row in questions))
    for name, template in (("student", STUDENTS_TEMPLATE), ("teacher", TEACHERS_TEMPLATE)):
        (model,) = (d for d in cache.glob(f"sorting-{name}-*") if d.is_dir())
        shutil.copytree(model, directory / name)
        (directory / name / "chat_template.jinja").write_text(template)
    return directory / "student", directory / "teacher", directory / "data"


def mean_logprobs(model: Path, template: str, samples: list[dict[str, Any]]) -> list[float]:
    """Of each response under ``model`` after its prompt in another template, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lm, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    means = []
    for row in samples:
        # The prompt is logged as the student was given it.
        content = row["prompt"].removeprefix(tokenizer.bos_token).strip()
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], chat_template=template, return_dict=True
        )["input_ids"]
        response = tokenizer(row["response"], add_special_tokens=False)["input_ids"]
        response += [tokenizer.eos_token_id] * (row["finish_reason"] == "stop")
        with torch.no_grad():
            logits = lm(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        means.append(float(torch.log_softmax(logits, -1)[range(len(response)), response].mean()))
    return means


def test_each_prompt_has_the_teacher_its_row_names(
    start: Any, finished: tuple[Path, str], cache: Path, tmp_path: Path
) -> None:
    """One of two teachers is the student itself, so only prompts for the other one have anything to teach."""
    (student,), (teacher,) = ([d for d in cache.glob(f"sorting-{n}-*") if d.is_dir()] for n in ("student", "teacher"))
    (data,) = (d for d in cache.glob("sorting-data-*") if d.is_dir())
    questions = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()[:32]]
    rows_of = [{**row, "source": "own" if i % 2 else "other"} for i, row in enumerate(questions)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of))
    file = f"[{tmp_path / 'data.jsonl'}]"
    run = start(
        f"model.path={student}", f"teacher.models={{own: {student}, other: {teacher}}}", "data.teacher_key=source",
        "teacher.n_gpus_per_node=2", f"data.train_files={file}", f"data.val_files={file}", "data.answer_key=answer",
        "rollout.max_response_length=8", "rollout.engine=hf", "trainer.total_steps=1", "trainer.batch_size=32",
        "trainer.n_logged_samples=32", "actor.lr=1e-9",
    )  # fmt: skip
    assert run.end(300) == 0, run.text()
    assert "actor.lr=1e-09" in run.text()
    logged = [json.loads(line) for line in (run.output / "samples.jsonl").read_text().splitlines()]
    source = {row["prompt"]: row["source"] for row in rows_of}
    apart = {name: [] for name in ("own", "other")}
    for sample in logged:
        apart[source[sample["prompt"]]].append(abs(sample["logprob_mean"] - sample["teacher_logprob_mean"]))
    assert len(apart["own"]) == len(apart["other"]) == 16
    assert max(apart["own"]) < 1e-4 < 0.1 < sum(apart["other"]) / 16
