"""Workload W1: a student of 0.5 billion parameters and a teacher of 1.5, 128 prompts of 128 tokens and 512 a response.

Random weights in the shapes of Qwen2.5, as Llama models, whose tokenizer transformers takes as it is.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.gpu.checks.context import Context, require
from tests.gpu.checks.program import Run, run

TRL_STEP_S, TRL_PEAK_GIB = 4.95, 64.8
"""Of TRL 1.16's DistillationTrainer on one H200, vLLM colocated; the peak is that of its trainer."""
GOAL_STEP_S, GOAL_PEAK_GIB = 2.6, 40.0
"""Of this workload on one H200, which nothing fails for."""

WORDS, PROMPT, RESPONSE, BATCH, STEPS = 151_936, 128, 512, 128, 7
SHAPES = {"student": (896, 4864, 24, 14, 2), "teacher": (1536, 8960, 28, 12, 2)}
SMALL = {"student": (64, 128, 2, 2, 2), "teacher": (128, 256, 2, 4, 2)}


def against_trl(context: Context) -> None:
    """Seconds a step and by stage, and peak memory, beside TRL's and beside the goals."""
    result = run_w1(context, "w1")
    step = result.median("timing_s/step")
    stages = {stage: result.median(f"timing_s/{stage}") for stage in ("generate", "score", "update", "sync")}
    context.note(step_s=step, stages={name: float(f"{value:.3g}") for name, value in stages.items()})
    context.note(mismatch_kl_max=result.largest("mismatch/kl"), first_step_s=result.first_step_s)
    require(result.largest("mismatch/kl") < 0.02, "sampler and trainer disagree")
    if context.rehearsal:
        return
    actor = result.largest("memory/actor/peak_gb") * 1e9 / (1 << 30)
    context.note(trl_step_s=TRL_STEP_S, of_trl=step / TRL_STEP_S, actor_peak_gib=actor, trl_peak_gib=TRL_PEAK_GIB)
    context.note(goal_step_s=GOAL_STEP_S, step_of_goal=step / GOAL_STEP_S)
    context.note(goal_peak_gib=GOAL_PEAK_GIB, peak_of_goal=actor / GOAL_PEAK_GIB)
    require(step < TRL_STEP_S, f"{step:.2f} s a step, TRL has {TRL_STEP_S}")
    require(actor < TRL_PEAK_GIB, f"{actor:.1f} GiB in the actor, TRL has {TRL_PEAK_GIB}")


def ahead(context: Context) -> None:
    """Seconds a step where the next batch is sampled while the last one is scored and trained, on the same GPU."""
    result = run_w1(context, "w1_ahead", "schedule.max_staleness=1")
    stages = ("step", "generate", "score", "update", "sync", "wait")
    median_s = {name: result.median(f"timing_s/{name}", but_last=1) for name in stages}  # nothing is sampled beside it
    step = median_s.pop("step")
    context.note(step_s=step, first_step_s=result.first_step_s, mismatch_kl_max=result.largest("mismatch/kl"))
    context.note(**median_s)
    require(result.largest("staleness/max") == 1, "nothing was sampled ahead")
    require(result.largest("mismatch/kl") < 0.02, "sampler and trainer disagree")
    if not context.rehearsal:
        context.note(trl_step_s=TRL_STEP_S, of_trl=step / TRL_STEP_S, goal_step_s=GOAL_STEP_S)
        context.note(actor_peak_gib=result.largest("memory/actor/peak_gb") * 1e9 / (1 << 30))


def run_w1(context: Context, name: str, *overrides: str) -> Run:
    """Run the workload, in a rehearsal a small one, with its output in the directory ``name``."""
    small = context.rehearsal
    words, prompt, response, batch = (512, 16, 16, 16) if small else (WORDS, PROMPT, RESPONSE, BATCH)
    path = context.scratch / "w1-models"
    if not (path / "prompts.jsonl").exists():
        make_models(path, SMALL if small else SHAPES, words, prompt, batch)
    result = run(
        context, name, "placement=single_gpu",
        f"model.path={path / 'student'}", f"teacher.model.path={path / 'teacher'}",
        f"data.train_files=[{path / 'prompts.jsonl'}]", f"data.val_files=[{path / 'prompts.jsonl'}]",
        "data.prompt_key=prompt", "data.val_limit=8", f"data.max_prompt_length={prompt}",
        f"rollout.max_response_length={response}", f"trainer.batch_size={batch}", "trainer.val_every=1000",
        f"trainer.total_steps={4 if small else STEPS}", f"rollout.max_num_seqs={batch}", "actor.lr=1e-6",
        *overrides,
    )  # fmt: skip
    context.note({f"{name}_each_step_s": [float(f"{row['timing_s/step']:.3g}") for row in result.steps]})
    return result


def make_models(
    path: Path, shapes: dict[str, tuple[int, int, int, int, int]], words: int, prompt: int, batch: int
) -> None:
    """Models, a tokenizer of as many words, and prompts of as many words as they are to have tokens."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", *(f"w{i}" for i in range(2, words))]  # a special token is seen within words as well
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")
    torch.manual_seed(0)
    for name, (width, inner, layers, heads, groups) in shapes.items():
        config = LlamaConfig(
            hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=groups, vocab_size=words, tie_word_embeddings=True, max_position_embeddings=4096,
            eos_token_id=1, pad_token_id=0, bos_token_id=None,
        )  # fmt: skip
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = LlamaForCausalLM(config).bfloat16()
        model.cpu().save_pretrained(path / name)
        torch.cuda.empty_cache()  # it would count among what the run takes of the GPU
        tokenizer.save_pretrained(path / name)
    rows = torch.randint(2, words, (batch * (STEPS + 2), prompt)).tolist()
    texts = [" ".join(f"w{i}" for i in row) for row in rows]
    require(tokenizer(texts)["input_ids"] == rows, f"prompts are not {prompt} tokens each")
    (path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
