"""Two small language models to distil, trained from scratch on your own questions and answers.

    python recipes/on_policy_distill/prepare.py TRAIN.jsonl --out DIR --held-out TEST.jsonl

trains one byte-level BPE tokenizer on the text, then a teacher and a smaller, less trained student on
``question <sep> answer <eos>``, and writes ``DIR/teacher`` and ``DIR/student`` in Hugging Face format. The tokenizer
itself appends ``<sep>`` to what it encodes, so a run's prompts (``data.prompt_key=question``) end in it, and what the
student samples after it is an answer.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gkd.data.reader import read_rows
from gkd.errors import ConfigError

PAD, SEPARATOR, EOS = "<pad>", "<sep>", "<eos>"
MAX_TOKENS, HEAD_DIM, IGNORED = 512, 32, -100  # longer texts are cut; padding is IGNORED by the loss
N_HELD_OUT = 256  # texts whose loss is reported
SAID_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Size:
    """What is trained, and for how long."""

    name: str
    layers: int
    width: int
    steps: int


def read_pairs(file: str, question_key: str, answer_key: str) -> list[tuple[str, str]]:
    """Return question and answer of every row. Raises ConfigError for a bad file or a row without them."""
    return [
        (str(row.get(question_key, "--question-key")), str(row.get(answer_key, "--answer-key")))
        for row in read_rows(file)
    ]


def train_tokenizer(pairs: list[tuple[str, str]], vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer of the text, which appends the separator to what it encodes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    # Digits one by one: arithmetic is learnt on digits, not on whatever numbers were frequent.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, SEPARATOR, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for pair in pairs for text in pair), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {SEPARATOR}", special_tokens=[(SEPARATOR, tokenizer.token_to_id(SEPARATOR))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        sep_token=SEPARATOR,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def encode(pairs: list[tuple[str, str]], tokenizer: Any) -> list[np.ndarray]:
    """Return the token ids of ``question <sep> answer <eos>``: the question exactly as a run encodes its prompts."""
    questions = tokenizer([question for question, _ in pairs])["input_ids"]
    answers = tokenizer([answer for _, answer in pairs], add_special_tokens=False)["input_ids"]
    return [
        np.array([*question, *answer, tokenizer.eos_token_id][:MAX_TOKENS])
        for question, answer in zip(questions, answers, strict=True)
    ]


def new_model(size: Size, tokenizer: Any, seed: int) -> Any:
    """Return a randomly initialised Llama of this size, float32, embeddings not tied."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.width,
        intermediate_size=2 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.width // HEAD_DIM,
        num_key_value_heads=size.width // HEAD_DIM,
        head_dim=HEAD_DIM,
        max_position_embeddings=2 * MAX_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def pad(texts: list[np.ndarray]) -> Any:
    """Return a tensor [texts, longest] of ids, padded on the right with IGNORED."""
    import torch

    ids = np.full((len(texts), max(map(len, texts))), IGNORED)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    return torch.from_numpy(ids)


def batches(texts: list[np.ndarray], batch_size: int, seed: int) -> Iterator[Any]:
    """Yield shuffled batches of texts of similar length, so that little is padded, without end."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(texts))
        for start in range(0, len(order), 16 * batch_size):
            near = sorted(order[start : start + 16 * batch_size], key=lambda i: len(texts[i]))
            groups = [near[i : i + batch_size] for i in range(0, len(near), batch_size)]
            for group in rng.permutation(len(groups)):
                yield pad([texts[i] for i in groups[group]])


def mean_loss(model: Any, ids: Any) -> Any:
    """Compute the mean next-token loss, in nats, over every token but the padding."""
    import torch

    # Padding comes last, where no earlier position sees it, so that causal attention needs no mask.
    logits = model(input_ids=ids[:, :-1].clamp(min=0), use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=IGNORED)


def held_out_loss(model: Any, texts: list[np.ndarray]) -> float:
    """Compute the next-token loss in nats a token, averaged over all tokens of ``texts``."""
    import torch

    total, n_tokens = 0.0, 0
    ordered = sorted(texts, key=len)
    with torch.no_grad():
        for start in range(0, len(ordered), 32):
            group = ordered[start : start + 32]
            n = sum(len(text) - 1 for text in group)
            total += float(mean_loss(model, pad(group))) * n
            n_tokens += n
    return total / n_tokens


def train(model: Any, size: Size, texts: list[np.ndarray], args: argparse.Namespace) -> None:
    """Train with AdamW for ``size.steps`` steps; the learning rate rises, then falls along half a cosine."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=size.steps + 1, pct_start=0.1)
    stream, began, last_print = batches(texts, args.batch_size, args.seed), time.monotonic(), 0.0
    for step in range(1, size.steps + 1):
        loss = mean_loss(model, next(stream))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        now = time.monotonic()
        if now - last_print > SAID_EVERY_S or step == size.steps:
            last_print = now
            left = (now - began) / step * (size.steps - step)
            print(f"{size.name}: step {step} of {size.steps}, loss {loss.item():.3f}, {left:.0f} s left", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train_file", help="JSONL, Parquet or datasets directory with questions and answers")
    parser.add_argument("--out", required=True, help="directory to write teacher/ and student/ into")
    parser.add_argument("--held-out", help="file whose loss is reported; default: the last rows of the training file")
    parser.add_argument("--question-key", default="question", help="column of the question (default: %(default)s)")
    parser.add_argument("--answer-key", default="answer", help="column of the answer (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=2048, help="tokens (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="texts a step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order (default: %(default)s)")
    for name, layers, width, steps in (("teacher", 4, 256, 400), ("student", 2, 128, 150)):
        parser.add_argument(f"--{name}-layers", type=int, default=layers, help="default: %(default)s")
        parser.add_argument(f"--{name}-width", type=int, default=width, help="a multiple of 32; default: %(default)s")
        parser.add_argument(f"--{name}-steps", type=int, default=steps, help="default: %(default)s")
    return parser.parse_args()


def prepare(args: argparse.Namespace) -> None:
    """Train tokenizer, teacher and student, and write them. Raises ConfigError for whatever cannot be used."""
    sizes = [
        Size(name, *(getattr(args, f"{name}_{what}") for what in ("layers", "width", "steps")))
        for name in ("teacher", "student")
    ]
    out = Path(args.out)
    for size in sizes:
        if (out / size.name).exists():
            raise ConfigError(f"--out={out}: already holds {size.name}/; remove it or name another directory")
        if size.width < HEAD_DIM or size.width % HEAD_DIM:
            raise ConfigError(f"--{size.name}-width={size.width}: must be a multiple of {HEAD_DIM}")
    pairs = read_pairs(args.train_file, args.question_key, args.answer_key)
    if args.held_out:
        held_out = read_pairs(args.held_out, args.question_key, args.answer_key)[:N_HELD_OUT]
    else:
        n = min(N_HELD_OUT, len(pairs) // 10)
        pairs, held_out = pairs[: len(pairs) - n], pairs[len(pairs) - n :]
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = train_tokenizer(pairs, args.vocab_size)
    texts, held_out_texts = encode(pairs, tokenizer), encode(held_out, tokenizer)
    print(f"{len(texts)} texts, {sum(map(len, texts))} tokens, a vocabulary of {len(tokenizer)}", flush=True)
    for size in sizes:
        model = new_model(size, tokenizer, args.seed)
        train(model, size, texts, args)
        model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
        model.save_pretrained(out / size.name)
        tokenizer.save_pretrained(out / size.name)
        result = (
            f"{held_out_loss(model, held_out_texts):.3f} nats a token on held-out text" if held_out_texts else "done"
        )
        print(f"{size.name}: {model.num_parameters():,} parameters, {result}, kept in {out / size.name}", flush=True)


def main() -> None:
    """Run :func:`prepare`; a mistake in the arguments or the data ends in one line and exit code 2."""
    args = parse_arguments()
    # Before torch is loaded: threads that spin while they wait are several times slower on shared cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        prepare(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
