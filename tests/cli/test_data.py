"""``gkd data``: what the data of a run becomes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gkd.cli.command import main
from tests.data.models import TEMPLATE, save_model, word_tokenizer
from tests.error_text import contains_in_order


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    save_model(directory / "student", tokenizer=word_tokenizer(template=TEMPLATE))
    save_model(directory / "teacher", tokenizer=word_tokenizer(template=TEMPLATE + " d"))
    rows = [{"question": " ".join("a" * n), "answer": ["b", n]} for n in (1, 2, 8, 9, 300)]
    (directory / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "long.jsonl").write_text(json.dumps({"question": "a " * 300, "answer": "b"}) + "\n")
    return directory


def arguments(files: Path, train: str = "q.jsonl") -> list[str]:
    return [
        "data", "+recipe=on_policy_distill", f"model.path={files}/student", f"teacher.model.path={files}/teacher",
        f"data.train_files=[{files}/{train}]", f"data.val_files=[{files}/q.jsonl]", "data.prompt_key=question",
        "data.answer_key=answer", "data.apply_chat_template=true", "data.max_prompt_length=10",
    ]  # fmt: skip


def test_prompts_are_shown_as_student_and_teacher_see_them(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments(files), "teacher.chat_template=own", "--rows", "1"]) == 0
    train, val = capsys.readouterr().out.split("=== data.val_files")
    lines = [line.rstrip() for line in train.splitlines()]
    first, seen, teachers, teacher_sees, answers = lines[1:6]
    assert (seen, teacher_sees) == ("<user> a <assistant>", "<user> a <assistant> d")
    assert contains_in_order(first, "row 1", "3 tokens") and contains_in_order(teachers, "teacher", "4 tokens")
    assert contains_in_order(answers, "'b'", "'1'")
    assert "row 2" not in train
    used, *left_out = [line for line in lines if re.search(r" (is|are) ", line)]
    assert re.findall(r"\d+", used) == ["2", "2"]
    assert [re.findall(r"\d+", line) for line in left_out] == [["2", "10", "10"], ["1", "10", "10"]]
    assert all("(data.max_prompt_length=10)" in line for line in left_out)
    assert ["teacher" in line for line in left_out] == [False, True]
    shown = {line.rpartition("█")[0].split("  ")[0].strip(): line.split()[-2] for line in lines if "█" in line}
    assert shown == {"4 tokens": "1", "5 tokens": "1", "more than 10": "3"}
    assert not any(line.startswith("3 tokens") for line in lines)  # it begins with the shortest
    assert "2 prompts" in val


def test_what_a_run_would_refuse_is_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(files)) == 2
    assert "prompted differently" in capsys.readouterr().err


def test_models_that_are_a_size_alone_are_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `gkd plan` takes them."""
    named = [own for own in arguments(files) if "model.path" not in own]
    assert main([*named, "model.size=0.5b", "teacher.model.size=7b"]) == 2
    assert contains_in_order(capsys.readouterr().err, "model.size=0.5b", "model.path")


def test_a_template_in_which_a_line_does_not_end_is_warned_of(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = 'data.prompt_template="{question}\\nanswer:"'
    assert main([*arguments(files), "teacher.chat_template=student", template, "--rows", "1"]) == 0
    assert contains_in_order(capsys.readouterr().out, "data.prompt_template", "backslash")


def test_models_to_evaluate_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "models.base=/tmp/none", "+sets=gsm8k"]) == 2
    assert contains_in_order(capsys.readouterr().err, "models.*", "gkd evaluate")


def test_prompts_that_are_all_far_too_long_are_counted(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for template in ("student", "own"):
        assert main([*arguments(files, "long.jsonl"), f"teacher.chat_template={template}"]) == 2
        printed = capsys.readouterr()
        train, val = printed.out.split("=== data.val_files")
        (left_out,) = [line for line in train.splitlines() if "left out" in line]
        assert re.findall(r"\d+", left_out) == ["1", "10", "10"] and re.search(r"more than 10 +1 ", train)
        assert "row 1" in val and contains_in_order(printed.err, "long.jsonl", " 10 tokens", "20")


def test_rows_are_those_of_their_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = f"data.train_files=[{files}/q.jsonl,{files}/long.jsonl,{files}/q.jsonl]"
    assert main([*arguments(files), train, "teacher.chat_template=student", "--rows", "1"]) == 0
    assert re.findall(r"row \d+", capsys.readouterr().out) == ["row 1"] * 3


def test_a_reference_has_its_say_in_how_long_a_prompt_may_be(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = save_model(files / "short", tokenizer=word_tokenizer(template=TEMPLATE))
    config = json.loads((reference / "config.json").read_text())
    (reference / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 12}))
    own = [a for a in arguments(files) if "teacher" not in a]
    own[1] = "+recipe=grpo"
    own += ["algorithm.kl.coef=0.1", f"reference.model.path={reference}", "rollout.max_response_length=8"]
    assert main(own) == 0
    bounds = ("longer than 4 tokens", "data.max_prompt_length=10", "positions", " 4 ", "rollout.max_response_length=8")
    assert contains_in_order(" ".join(capsys.readouterr().out.split()), *bounds)


def test_what_can_be_shown_and_not_be_used_ends_with_the_runs_own_refusal(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "longer.jsonl").write_text(json.dumps({"question": "a " * 20, "answer": "b"}) + "\n")
    assert main([*arguments(files, "longer.jsonl"), "teacher.chat_template=student"]) == 2
    printed = capsys.readouterr()
    assert contains_in_order(printed.out, "row 1", "more than 10")
    assert " 10 tokens (data.max_prompt_length" in printed.err
    (files / "unanswered.jsonl").write_text(json.dumps({"question": "a", "answer": " "}) + "\n")
    supervised = [a for a in arguments(files, "unanswered.jsonl") if "teacher" not in a]
    supervised[1] = "+recipe=sft"
    assert main(supervised) == 2
    printed = capsys.readouterr()
    assert "row 1" in printed.out and "data.answer_key=answer" in printed.err
    dealt = f"data.train_files=[{files}/q.jsonl,{files}/longer.jsonl]", "data.train_weights=[1,2]"
    assert main([*arguments(files), *dealt, "teacher.chat_template=student"]) == 2
    printed = capsys.readouterr()
    assert "0 prompts" in printed.out and "data.train_files[1]" in printed.err


def test_the_limit_of_validation_is_of_all_files_and_of_prompts_that_fit(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": "a " * n, "answer": "b"} for n in (20, 1, 2)]
    (files / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    val = f"data.val_files=[{files}/mixed.jsonl,{files}/q.jsonl,{files}/long.jsonl]"
    shown = [*arguments(files), val, "teacher.chat_template=student"]
    assert main([*shown, "data.val_limit=3"]) == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    _, mixed, more = text.split("=== data.val_files")
    assert "2 prompts" in mixed and contains_in_order(more, "1 prompt is", "data.val_limit=3")
    assert f"{files}/long.jsonl" in text and f"{files}/long.jsonl" not in mixed + more


def test_sets_of_questions_are_shown_as_the_student_is_asked_them(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = [*arguments(files), "teacher.chat_template=student", "rollout.max_response_length=20", "--rows", "1"]
    settings = {"files": f"[{files}/long.jsonl,{files}/q.jsonl]", "prompt_key": "question", "answer_key": "answer",
                "system_prompt": "b", "samples": "2", "temperature": "0.5", "max_response_length": "22"}  # fmt: skip
    a_set = [f"data.val_sets.hard.{name}={value}" for name, value in settings.items()]
    assert main([*shown, *a_set]) == 0
    own = capsys.readouterr().out.partition("=== data.val_sets.hard")[2]
    lines = [line.rstrip() for line in own.splitlines()]
    assert lines[0].endswith(f"{files}/long.jsonl, {files}/q.jsonl")
    assert contains_in_order(lines[1], "row 2", "2 messages") and lines[2] == "<system> b <user> a <assistant>"
    assert contains_in_order(lines[3], "'b'", "'1'") and "teacher" not in own
    used, left_out = [line for line in lines if re.search(r" (is|are) ", line)]
    assert contains_in_order(used, "2 questions", "2 times", "0.5", "2 with")
    assert re.findall(r"\d+", left_out) == ["4", "8", "22", "30"]  # 10 + 20 tokens in all
    assert re.search(r"more than 8 +4 ", own)
    (files / "one.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question": "a", "answer": null}\n')
    assert main([*shown, f"data.val_sets.hard.files={files}/one.jsonl", *a_set[1:]]) == 0
    assert contains_in_order(capsys.readouterr().out, "=== data.val_sets.hard", "answer_key=answer", "1 of 2")
    assert main([*shown, *a_set[:1]]) == 2  # no answers
    printed = capsys.readouterr()
    assert "=== data.val_files" in printed.out and "data.val_sets.hard" in printed.err
