"""Training seconds and steps until a student has 0.9 of its teacher's accuracy: this system and TRL, in turn.

    python tests/benchmarks/time_to_quality.py [--rounds 3] [--every 10] [--share 0.9] [--json FILE] [SETTING=VALUE ...]

The built-in task's own student, teacher and prompts (sorting digits, made once for each seed), 64 prompts
a step, responses of up to 12 tokens, reverse KL over the whole vocabulary at temperature 1, the recipe's learning rate
(AdamW, without decay), float32, on all cores of this machine. Every ``--every`` steps both are validated by greedy
answers to the same held-out prompts, which does not count; nor do starting, loading and the first two steps, in which
caches warm. In each round both sides are started anew, with the round's number as their seed, since at this learning
rate accuracies swing from one validation to the next; which of them begins changes from round to round. SETTINGs are
given to this system's runs, such as ``rollout.engine=hf``. TRL comes with the extra ``trl``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH, RESPONSE, MOST_STEPS, WARM, LR = 64, 12, 400, 2, 1e-3


def run_gkd(cache: Path, every: int, seed: int, settings: list[str]) -> dict[str, Any]:
    """Return ``accuracy`` by step, ``seconds`` of each step, and the ``teacher``'s accuracy, of the real command."""
    output = Path(tempfile.mkdtemp(prefix="gkd-", dir=cache)) / "run"
    command = [sys.executable, "-m", "gkd.main", "+recipe=on_policy_distill", f"data.cache_dir={cache}"]
    command += [f"trainer.output_dir={output}", f"trainer.val_every={every}", f"trainer.total_steps={MOST_STEPS}"]
    command += [f"trainer.batch_size={BATCH}", f"rollout.max_response_length={RESPONSE}", f"actor.lr={LR}"]
    command += ["actor.lr_decay=constant", "trainer.save_minutes=null", f"trainer.seed={seed}", *settings]
    subprocess.run(command, check=True, timeout=1800, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {
        "accuracy": {row["step"]: row["val/accuracy"] for row in rows if "val/accuracy" in row},
        "seconds": {row["step"]: row["timing_s/step"] for row in rows if row["step"]},
        "teacher": json.loads((output / "summary.json").read_text())["teacher"]["val/accuracy"],
    }


def run_trl(cache: Path, every: int, seed: int, target_accuracy: float) -> dict[str, Any]:
    """Return the same of TRL's trainer, in this process, until its accuracy is ``target_accuracy``."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets
    import torch
    from transformers import AutoTokenizer, TrainerCallback
    from trl import DistillationConfig, DistillationTrainer

    torch.set_num_threads(os.cpu_count() or 1)
    student, teacher, data = (one(cache, name) for name in ("student", "teacher", "data"))
    tokenizer = AutoTokenizer.from_pretrained(student, padding_side="left")
    prompts, held_out = (read(data / f"{split}.jsonl") for split in ("train", "val"))
    seconds: dict[int, float] = {}
    accuracy: dict[int, float] = {}
    began = [time.monotonic()]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            seconds[state.global_step] = time.monotonic() - began[0]
            if state.global_step % every == 0:
                accuracy[state.global_step] = answered(more["model"], tokenizer, held_out)
                control.should_training_stop = accuracy[state.global_step] >= target_accuracy
            began[0] = time.monotonic()

    arguments = DistillationConfig(
        output_dir=str(cache / "trl"),
        teacher_model_name_or_path=str(teacher),
        max_steps=MOST_STEPS,
        seed=seed,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        max_completion_length=RESPONSE,
        beta=1.0,
        learning_rate=LR,
        lr_scheduler_type="constant",
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        logging_steps=1000,
    )
    trainer = DistillationTrainer(
        model=str(student),
        teacher_model=str(teacher),
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": row["prompt"]} for row in prompts]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    accuracy[0] = answered(trainer.model, tokenizer, held_out)
    began[0] = time.monotonic()
    trainer.train()
    return {"accuracy": accuracy, "seconds": seconds}


def one(cache: Path, name: str) -> Path:
    """Return the directory of what the built-in task made."""
    (directory,) = (entry for entry in cache.glob(f"sorting-{name}-*") if entry.is_dir())
    return directory


def read(file: Path) -> list[dict[str, str]]:
    """Return the rows of a JSON-lines file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def answered(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> float:
    """Return the share of prompts whose greedy answer is the row's."""
    import torch

    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    with torch.no_grad():
        made = model.generate(**inputs, max_new_tokens=RESPONSE, do_sample=False)
    texts: list[str] = tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)


def trl_in_a_process_of_its_own(cache: Path, every: int, seed: int, target_accuracy: float) -> dict[str, Any]:
    """Return what :func:`run_trl` measures, with nothing of it left behind in this process."""
    rows = cache / "trl.json"
    command = [
        sys.executable,
        __file__,
        "--measure-trl",
        str(cache),
        "--every",
        str(every),
        "--share",
        str(target_accuracy),
    ]
    done = subprocess.run(
        [*command, "--seed", str(seed), "--json", str(rows)],
        check=False,
        timeout=1800,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"TRL's side failed: {done.stderr.strip().splitlines()[-1:]}")
    measured = json.loads(rows.read_text())
    return {name: {int(step): value for step, value in by.items()} for name, by in measured.items()}


def until(run: dict[str, Any], target_accuracy: float) -> dict[str, float | None]:
    """Return ``steps`` until the accuracy was ``target_accuracy``, seconds ``a step``, and the ``seconds`` that makes.

    A step takes the median, so that what else runs on the machine for a while is not counted. None where the accuracy
    never was ``target_accuracy``. ``highest``: the highest accuracy.
    """
    steps = min((step for step, value in run["accuracy"].items() if value >= target_accuracy), default=None)
    a_step = statistics.median(value for step, value in run["seconds"].items() if step > WARM)
    seconds = None if steps is None else steps * a_step
    return {"steps": steps, "seconds": seconds, "a step": a_step, "highest": max(run["accuracy"].values())}


def line_of(name: str, made: dict[str, float | None]) -> str:
    """Return what one run came to."""
    rest = f"steps of {made['a step']:.3f} s, at most {made['highest']:.3f}"
    if made["steps"] is None:
        return f"{name} not in {MOST_STEPS} {rest}"
    return f"{name} {made['seconds']:.1f} s in {made['steps']:.0f} {rest}"


def compared(rounds: dict[str, list[dict[str, float | None]]]) -> list[str]:
    """Return medians of both sides and of the rounds' ratios, over rounds in which both came so far."""
    lines = []
    for what in ("seconds", "steps", "a step"):
        figures = [(own[what], peer[what]) for own, peer in zip(rounds["gkd"], rounds["TRL"], strict=True)]
        pairs = [(own, peer) for own, peer in figures if own is not None and peer is not None]
        if pairs:
            ratios = [own / peer for own, peer in pairs]
            own, peer = (statistics.median(side) for side in zip(*pairs, strict=True))
            lines.append(
                f"{what:8} gkd {own:.3f}, TRL {peer:.3f}: {statistics.median(ratios):.2f} of TRL's "
                f"({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} rounds)"
            )
    return lines


def main() -> None:
    """Alternate, and print steps and seconds of both and the ratio of each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.9, help="of the teacher's accuracy")
    parser.add_argument("--json", type=Path, help="write every round there")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--measure-trl", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE")
    options = parser.parse_args()
    if options.measure_trl:
        options.json.write_text(json.dumps(run_trl(options.measure_trl, options.every, options.seed, options.share)))
        return
    rounds: dict[str, list[dict[str, float | None]]] = {"TRL": [], "gkd": []}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.rounds):
            seed = options.seed + number
            cache = Path(scratch, str(seed))
            cache.mkdir()
            first = run_gkd(cache, MOST_STEPS, seed, [*options.settings, "trainer.total_steps=1"])  # makes the models
            target_accuracy = options.share * first["teacher"]
            for name in ("TRL", "gkd") if number % 2 == 0 else ("gkd", "TRL"):
                run = (
                    run_gkd(cache, options.every, seed, options.settings)
                    if name == "gkd"
                    else trl_in_a_process_of_its_own(cache, options.every, seed, target_accuracy)
                )
                rounds[name].append(until(run, target_accuracy))
            summary = "; ".join(line_of(name, made[-1]) for name, made in rounds.items())
            print(f"round {number + 1}, seed {seed}: {summary}", flush=True)
    print(*compared(rounds), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
