"""Everything a user can get wrong before anything runs: one line that names it, exit code 2."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from gkd.main import main
from gkd.recipes.sort_digits.sorting import make_tokenizer

ROW = '{"question": "1 2 =", "answer": "1 2"}\n'


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny models with one tokenizer, one with another, an encoder, and data files in every state."""
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

    found = tmp_path_factory.mktemp("inputs")
    tokenizer = make_tokenizer()
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    for name in ("student", "teacher", "other"):
        model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=len(tokenizer), max_position_embeddings=64))
        model.save_pretrained(found / name)
        tokenizer.save_pretrained(found / name)
    narrow = LlamaForCausalLM(LlamaConfig(**shape | {"hidden_size": 24}, vocab_size=len(tokenizer)))
    narrow.save_pretrained(found / "narrow")
    tokenizer.save_pretrained(found / "narrow")
    BertModel(BertConfig(**shape, vocab_size=20)).save_pretrained(found / "bert")
    tokenizer.save_pretrained(found / "bert")
    # Another tokenizer: two words have changed places.
    described = json.loads((found / "other" / "tokenizer.json").read_text())
    words = described["model"]["vocab"]
    words["1"], words["2"] = words["2"], words["1"]
    (found / "other" / "tokenizer.json").write_text(json.dumps(described))
    (found / "good.jsonl").write_text(ROW * 3)
    (found / "empty.jsonl").write_text("")
    (found / "broken.jsonl").write_text(ROW + "{not json\n" + ROW)
    (found / "other_key.jsonl").write_text('{"text": "1 2 ="}\n')
    (found / "unanswered.jsonl").write_text(ROW + '{"question": "1 =", "answer": null}\n')
    (found / "long.jsonl").write_text(json.dumps({"question": "1 " * 60 + "=", "answer": "1"}) + "\n")
    (found / "run").mkdir()
    (found / "run" / "metrics.jsonl").write_text("{}\n")
    return found


def command(files: Path, *overrides: str, **changed: str) -> list[str]:
    """The command on own models and data, with some parts changed."""
    parts = {
        "model.path": str(files / "student"),
        "teacher.model.path": str(files / "teacher"),
        "data.train_files": f"[{files / 'good.jsonl'}]",
        "data.val_files": f"[{files / 'good.jsonl'}]",
        "data.prompt_key": "question",
        "data.answer_key": "answer",
        "rollout.max_response_length": "8",
        "trainer.output_dir": str(files / "new"),
    }
    parts |= {key.replace("__", "."): value.replace("FILES", str(files)) for key, value in changed.items()}
    return ["+recipe=on_policy_distill", *(f"{k}={v}" for k, v in parts.items()), *overrides]


CASES = {
    "no such model": ({"model__path": "FILES/none"}, r"model\.path=.*none: no such directory"),
    "nobody's home": ({"model__path": "'~nobody-at-all/x'"}, r"model\.path=~nobody-at-all/x: no such directory"),
    "data in nobody's home": (
        {"data__val_files": "['~nobody-at-all/x.jsonl']"},
        r"~nobody-at-all/x\.jsonl does not exist",
    ),
    "no such teacher": ({"teacher__model__path": "FILES/none"}, r"teacher\.model\.path=.*none"),
    "no causal language model": ({"model__path": "FILES/bert"}, r"model\.path=.*bert: is no causal language model"),
    "other tokenizer": (
        {"teacher__model__path": "FILES/other"},
        r"tokenizers of .*student.* and .*other differ: id \d+",
    ),
    "no kernel for the student": (
        {"model__path": "FILES/narrow"},
        r"model\.path=.*narrow: vLLM on a CPU has no attention with heads of 24, only of .*; rollout\.engine=hf",
    ),
    "no kernel for the teacher": (
        {"teacher__model__path": "FILES/narrow"},
        r"teacher\.model\.path=.*narrow: .* heads of 24, .*; choose another model, or score on a machine with a GPU",
    ),
    "no such file": ({"data__train_files": "[FILES/none.jsonl]"}, r"none\.jsonl"),
    "empty file": ({"data__val_files": "[FILES/empty.jsonl]"}, r"empty\.jsonl"),
    "not JSON": ({"data__train_files": "[FILES/broken.jsonl]"}, r"broken\.jsonl.*line 2.*JSON"),
    "no such key": ({"data__train_files": "[FILES/other_key.jsonl]"}, r"other_key\.jsonl.*'question'"),
    "no such answer": ({"data__answer_key": "solution"}, r"good\.jsonl.*'solution'"),
    "no answer to be judged by": (
        {
            "data__train_files": "[FILES/unanswered.jsonl]",
            "algorithm__reward_weight": "1",
            "rollout__n": "2",
            "reward__functions": "[accuracy]",
        },
        r"data\.answer_key=answer: 1 of 2 training prompts have no answer.*accuracy.*row 2",
    ),
    "no answer to learn from": (
        {"data__train_files": "[FILES/unanswered.jsonl]", "algorithm__on_policy_share": "0.5"},
        r"data\.answer_key=answer: 1 of 2 training prompts have no answer.*learned from",
    ),
    "all too long": ({"data__train_files": "[FILES/long.jsonl]"}, r"max_prompt_length.*longer"),
    "a run is there": ({"trainer__output_dir": "FILES/run"}, r"trainer\.output_dir=.*already holds a run"),
    "nothing can be written": (
        {"trainer__output_dir": "/proc/self"},
        r"trainer\.output_dir=/proc/self cannot be written",
    ),
    "below a file": ({"trainer__output_dir": "FILES/good.jsonl/run"}, r"trainer\.output_dir=.* cannot be made: Not a"),
    "an empty name": ({"trainer__output_dir": "''"}, r"trainer\.output_dir is empty"),
    "batch of 0": ({"trainer__batch_size": "0"}, r"trainer\.batch_size=0"),
    "beta": ({"algorithm__loss__beta": "1.5"}, r"algorithm\.loss\.beta=1\.5"),
    "misspelt": ({"trainer__total_step": "5"}, r"trainer\.total_step \(did you mean trainer\.total_steps\?\)"),
    "overlap": ({"trainer__gpus": "0-1", "rollout__gpus": "1-2"}, r"trainer\.gpus and rollout\.gpus overlap"),
    "beyond the machine": ({"trainer__gpus": "90", "cluster__simulate_gpus": "8"}, r"trainer\.gpus=90.*0-7"),
    "too many GPUs": (
        {"rollout__n_gpus_per_node": "9", "cluster__simulate_gpus": "8"},
        r"11 GPUs.* 8 .*nearest.*rollout\.n_gpus_per_node=6",
    ),
    "too many GPUs here": ({"trainer__n_gpus_per_node": "500"}, r"502 GPUs.*nearest"),
    "adapters beside nothing": (
        {"actor__lora__r": "4", "actor__lora__target_modules": "[nothing]"},
        r"actor\.lora\.target_modules=\['nothing'\]: .*not found",
    ),
    "adapters beside what is no layer": (
        {"actor__lora__r": "4", "actor__lora__target_modules": "[norm]"},
        r"actor\.lora\.target_modules.*norm",
    ),
    "a pattern of layers that is none": (
        {"actor__lora__r": "4", "actor__lora__target_modules": "'(q_proj'"},
        r"actor\.lora\.target_modules=\(q_proj: .*regular expression",
    ),
    "no layers": ({"actor__lora__r": "4", "actor__lora__target_modules": "[]"}, r"actor\.lora\.target_modules"),
    "adapters without a rank": (
        {"actor__lora__target_modules": "[q_proj]"},
        r"actor\.lora: target_modules=.* set r as well",
    ),
    "more memory than there is": ({"plan__memory_gb": "2"}, r"needs \d.*GB.*plan\.check=false"),
    "response too long": ({"rollout__max_response_length": "64"}, r"rollout\.max_response_length=64.*64 positions"),
    "more than the teacher gives": (
        {"teacher__max_top_k": "4", "algorithm__loss__top_k": "10"},
        r"algorithm\.loss\.top_k=10.*teacher\.max_top_k=4",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_and_exit_code_2(case: str, files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    changed, message = CASES[case]
    connected = ray.is_initialized()
    assert main(command(files, **changed)) == 2
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert re.search(message, lines[0]), lines[0]
    assert "Traceback" not in out
    assert ray.is_initialized() == connected
    assert not (files / "new" / "metrics.jsonl").exists()


def test_a_few_long_prompts_are_counted_and_left_out(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (files / "some_long.jsonl").write_text(ROW + (files / "long.jsonl").read_text())
    changed = {"data__train_files": "[FILES/some_long.jsonl]", "trainer__gpus": "90"}  # ends before Ray starts
    assert main(command(files, **changed)) == 2
    assert "data.train_files: 1 prompts longer than 56 tokens are left out, 1 are used" in capfd.readouterr().out


def test_a_recipe_has_to_be_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "+recipe=" in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [["--learning_rate", "1e-5"], ["+recipe=grpo", "--learning-rate=1e-5"]])
def test_options_of_other_systems_are_answered_with_the_setting(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"error: unknown option --learning.rate\S*: .* section.name=value \(here: actor.lr\)", line)


def test_a_directory_that_another_run_holds(files: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        assert main(command(files, trainer__output_dir=str(tmp_path))) == 2
    finally:
        os.close(held)
    assert "another run is writing there now" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
