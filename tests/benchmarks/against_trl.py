"""Seconds a step of this system and of TRL's DistillationTrainer, in turn, on the same workload.

    python tests/benchmarks/against_trl.py [--rounds 5] [--steps 3] [--top-k 512 64] [--json FILE]

A machine's speed wanders within minutes, so short stretches of both alternate: in every round each side is started
anew, makes two steps that warm caches and are left out, and then ``--steps`` that count; which of them begins changes
from round to round. Printed are each round's medians and ratios, and at the end the median over rounds with the
smallest and the largest.

Workload: student 256 wide x 4 layers, teacher 512 x 8, vocabulary 512, 64 prompts of 64 tokens, responses of exactly
128, float32, reverse KL, AdamW, full fine-tuning, both on all cores of this machine. TRL samples with transformers'
generate and compares full vocabularies; this system samples and scores with vLLM, over the full vocabulary (top K 512,
the same loss) and over the top 64 with a tail. TRL comes with the extra ``trl``.
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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

VOCAB, PROMPT, RESPONSE, BATCH, WARM = 512, 64, 128, 64, 2
STAGES = ("generate", "score", "update", "sync")
SIZES = {"student": (256, 4), "teacher": (512, 8)}


def make(directory: Path) -> None:
    """Random models, a tokenizer of 512 words, and prompts of 64 words; nothing ends a response early."""
    import numpy as np
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    for name, (width, layers) in SIZES.items():
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 64,
            vocab_size=VOCAB,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=None,
        )
        LlamaForCausalLM(config).save_pretrained(directory / name)
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(directory / name)
    rng = np.random.default_rng(0)
    rows = [{"prompt": " ".join(f"w{i}" for i in rng.integers(2, VOCAB, PROMPT))} for _ in range(BATCH * 12)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_gkd(directory: Path, steps: int, top_k: int) -> list[dict[str, float]]:
    """Seconds of each step of the real command and of its stages, from its metrics.jsonl."""
    output = Path(tempfile.mkdtemp(prefix=f"gkd-{top_k}-", dir=directory)) / "run"
    prompts = directory / "prompts.jsonl"
    command = [sys.executable, "-m", "gkd.main", "+recipe=on_policy_distill", f"model.path={directory / 'student'}"]
    command += [f"teacher.model.path={directory / 'teacher'}", f"data.train_files=[{prompts}]"]
    command += [f"data.val_files=[{prompts}]", "data.val_limit=8", f"rollout.max_response_length={RESPONSE}"]
    command += [f"data.max_prompt_length={PROMPT}", f"trainer.total_steps={steps + WARM}", "trainer.val_every=1000"]
    command += [f"trainer.batch_size={BATCH}", f"algorithm.loss.top_k={top_k}", f"trainer.output_dir={output}"]
    command += ["actor.max_tokens_per_micro_batch=6144", "rollout.max_num_seqs=64", "actor.lr=1e-4"]
    subprocess.run(command, check=True, timeout=1800, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{s: row[f"timing_s/{s}"] for s in ("step", *STAGES)} for row in rows if row["step"] > WARM]


def run_trl(directory: Path, steps: int) -> list[dict[str, float]]:
    """Seconds of each step of TRL's trainer and of its stages, by the names of this system's, in this process."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets
    import torch
    from transformers import AutoTokenizer, TrainerCallback
    from trl import DistillationConfig, DistillationTrainer

    torch.set_num_threads(os.cpu_count() or 1)
    rows: list[dict[str, float]] = []
    began = [time.monotonic()]
    stages = {"generate": 0.0, "score": 0.0}

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            now = time.monotonic()
            step = now - began[0]
            rows.append({"step": step, **stages, "update": step - sum(stages.values())})
            began[0] = now
            stages.update(generate=0.0, score=0.0)

    def timed(stage: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.monotonic()
            result = run(*args, **kwargs)
            stages[stage] += time.monotonic() - started
            return result

        return call

    tokenizer = AutoTokenizer.from_pretrained(directory / "student", padding_side="left")
    tokenizer.eos_token = "w1"  # the trainer wants one; responses are held to their full length below
    arguments = DistillationConfig(
        output_dir=str(directory / "trl"),
        teacher_model_name_or_path=str(directory / "teacher"),
        max_steps=steps + WARM,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        max_completion_length=RESPONSE,
        generation_kwargs={"min_new_tokens": RESPONSE},
        beta=1.0,
        learning_rate=1e-4,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        logging_steps=1000,
    )
    prompts = [json.loads(line) for line in (directory / "prompts.jsonl").read_text().splitlines()]
    trainer = DistillationTrainer(
        model=str(directory / "student"),
        teacher_model=str(directory / "teacher"),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(prompts),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer._generate = timed("generate", trainer._generate)
    backbone = trainer.teacher_model.base_model  # the head is part of the loss there
    backbone.forward = timed("score", backbone.forward)
    trainer.train()
    return rows[WARM:]


def trl_in_a_process_of_its_own(directory: Path, steps: int) -> list[dict[str, float]]:
    """What :func:`run_trl` measures, with nothing of it left behind in this process."""
    rows = directory / "trl.json"
    command = [sys.executable, __file__, "--measure-trl", str(directory), "--steps", str(steps), "--json", str(rows)]
    subprocess.run(command, check=True, timeout=1800, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    measured: list[dict[str, float]] = json.loads(rows.read_text())
    return measured


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of every stage."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def spread(values: Sequence[float]) -> str:
    """Median, smallest and largest in words."""
    return f"{statistics.median(values):6.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Alternate, and print seconds a step, the ratio, and where the time goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--top-k", type=int, nargs="+", default=[VOCAB, 64])
    parser.add_argument("--json", type=Path, help="write every round's medians there")
    parser.add_argument("--measure-trl", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure_trl:
        options.json.write_text(json.dumps(run_trl(options.measure_trl, options.steps)))
        return
    rounds: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        make(directory)
        sides: list[tuple[str, Callable[[], list[dict[str, float]]]]] = [
            ("TRL", lambda: trl_in_a_process_of_its_own(directory, options.steps))
        ]
        sides += [(f"gkd, top K {k}", partial(run_gkd, directory, options.steps, k)) for k in options.top_k]
        for number in range(options.rounds):
            for name, measure in sides if number % 2 == 0 else reversed(sides):
                rounds.setdefault(name, []).append(medians(measure()))
            print(
                f"round {number + 1}: " + ", ".join(f"{n} {rounds[n][-1]['step']:.2f} s" for n, _ in sides), flush=True
            )
    for name, measured in rounds.items():
        ratios = [own["step"] / peer["step"] for own, peer in zip(measured, rounds["TRL"], strict=True)]
        ratio = "" if name == "TRL" else f", of TRL's {spread(ratios).strip()}"
        stages = ", ".join(
            f"{s} {statistics.median(row[s] for row in measured):.2f}" for s in measured[0] if s != "step"
        )
        print(f"{name:16} {spread([row['step'] for row in measured])} s a step{ratio}: {stages}")
    if options.json:
        options.json.write_text(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
