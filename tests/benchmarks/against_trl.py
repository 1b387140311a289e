"""Seconds a step of this system and of TRL's DistillationTrainer, one after the other, on the same workload.

    python tests/benchmarks/against_trl.py [--steps 6] [--top-k 512 64] [--only trl|gkd]

Workload: student 256 wide x 4 layers, teacher 512 x 8, vocabulary 512, 64 prompts of 64 tokens, responses of exactly
128, float32, reverse KL, AdamW, full fine-tuning, both on all cores of this machine. TRL samples with transformers'
generate and compares full vocabularies; this system samples and scores with vLLM, over the full vocabulary (top K 512,
the same loss) and over the top 64 with a tail. The first two steps of each warm caches and are left out; medians of
the rest. TRL comes with the extra ``trl``.
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

VOCAB, PROMPT, RESPONSE, BATCH, WARM = 512, 64, 128, 64, 2
SIZES = {"student": (256, 4), "teacher": (512, 8)}


def make(directory: Path) -> None:
    """Random models, a tokenizer of 512 words, and prompts of 64 words; nothing ends a response early."""
    import numpy as np
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
    """Steps of the real command, from its metrics.jsonl."""
    output = directory / f"gkd-{top_k}"
    prompts = directory / "prompts.jsonl"
    command = [sys.executable, "-m", "gkd.main", "+recipe=on_policy_distill", f"model.path={directory / 'student'}"]
    command += [f"teacher.model.path={directory / 'teacher'}", f"data.train_files=[{prompts}]"]
    command += [f"data.val_files=[{prompts}]", "data.val_limit=8", f"rollout.max_response_length={RESPONSE}"]
    command += [f"data.max_prompt_length={PROMPT}", f"trainer.total_steps={steps + WARM}", "trainer.val_every=1000"]
    command += [f"trainer.batch_size={BATCH}", f"algorithm.loss.top_k={top_k}", f"trainer.output_dir={output}"]
    command += ["actor.max_tokens_per_micro_batch=6144", "rollout.max_num_seqs=64", "actor.lr=1e-4"]
    subprocess.run(command, check=True, timeout=1800, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] > WARM]


def run_trl(directory: Path, steps: int) -> list[float]:
    """Seconds of each step of TRL's trainer, in this process."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets
    import torch
    from transformers import AutoTokenizer, TrainerCallback
    from trl import DistillationConfig, DistillationTrainer

    torch.set_num_threads(os.cpu_count() or 1)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.monotonic())

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
    rows = [json.loads(line) for line in (directory / "prompts.jsonl").read_text().splitlines()]
    trainer = DistillationTrainer(
        model=str(directory / "student"),
        teacher_model=str(directory / "teacher"),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    return [b - a for a, b in zip(ends[WARM - 1 :], ends[WARM:], strict=False)]


def main() -> None:
    """Run both and print seconds a step, the ratio, and where the time goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--top-k", type=int, nargs="+", default=[VOCAB, 64])
    parser.add_argument("--only", choices=["trl", "gkd"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        make(directory)
        peer = None
        if options.only != "gkd":
            peer = statistics.median(run_trl(directory, options.steps))
            print(f"TRL DistillationTrainer   {peer:6.2f} s a step", flush=True)
        for top_k in options.top_k if options.only != "trl" else []:
            rows = run_gkd(directory, options.steps, top_k)
            own = statistics.median(row["timing_s/step"] for row in rows)
            ratio = f", {own / peer:.2f} of TRL" if peer else ""
            stages = ("generate", "score", "update", "sync")
            parts = [f"{s} {statistics.median(row[f'timing_s/{s}'] for row in rows):.2f}" for s in stages]
            print(f"gkd, top K {top_k:3}            {own:6.2f} s a step{ratio}: {', '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
