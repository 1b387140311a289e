"""Word problems in GSM8K's format, and two untrained models with a tokenizer of their text.

    python recipes/from_sft_to_grpo/prepare.py --out DIR
    python recipes/from_sft_to_grpo/prepare.py --out DIR --train gsm8k/train.jsonl --test gsm8k/test.jsonl

writes ``DIR/train.jsonl`` and ``DIR/test.jsonl`` (``question`` and ``answer``, whose last line is ``#### NUMBER``), or
takes GSM8K's own files in their place, and ``DIR/teacher`` and ``DIR/student`` in Hugging Face format, with random
weights: the stages of the recipe train them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from gkd.errors import ConfigError
from gkd.recipes.on_policy_distill.prepare import Size, new_model, read_pairs, train_tokenizer

SIZES = {
    "teacher": Size("teacher", layers=4, width=256, steps=0),
    "student": Size("student", layers=2, width=128, steps=0),
}
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo")
THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps")
N_TRAIN, N_TEST = 8192, 512

Problem = tuple[str, str]
"""A question, and its answer with the steps that lead to it."""


def _buys(name: str, thing: str, draw: Callable[[int, int], int]) -> Problem:
    have, more, gives = draw(2, 20), draw(2, 20), draw(1, 9)
    both = have + more
    left = both - min(gives, both - 1)
    return (
        f"{name} has {have} {thing}. {name} buys {more} more and gives {both - left} away. "
        f"How many {thing} does {name} have now?",
        f"{have} + {more} = {both}\n{both} - {both - left} = {left}\n#### {left}",
    )


def _boxes(name: str, thing: str, draw: Callable[[int, int], int]) -> Problem:
    boxes, each, more = draw(2, 9), draw(2, 9), draw(1, 9)
    packed = boxes * each
    return (
        f"{name} packs {boxes} boxes with {each} {thing} each and keeps {more} {thing}. How many {thing} are there?",
        f"{boxes} * {each} = {packed}\n{packed} + {more} = {packed + more}\n#### {packed + more}",
    )


def _shares(name: str, thing: str, draw: Callable[[int, int], int]) -> Problem:
    friends, each, lost = draw(2, 9), draw(2, 9), draw(1, 9)
    rest = friends * each
    return (
        f"{name} had {rest + lost} {thing} and lost {lost} of them. {friends} friends share the rest. "
        f"How many {thing} does each friend get?",
        f"{rest + lost} - {lost} = {rest}\n{rest} / {friends} = {each}\n#### {each}",
    )


def problems(n: int, seed: int, other_than: frozenset[str] = frozenset()) -> Iterator[Problem]:
    """Yield ``n`` different problems, none of whose questions is among ``other_than``."""
    rng, questions = random.Random(seed), set(other_than)
    while n:
        kind = rng.choice((_buys, _boxes, _shares))
        question, answer = kind(rng.choice(NAMES), rng.choice(THINGS), rng.randint)
        if question not in questions:
            questions.add(question)
            n -= 1
            yield question, answer


def write(file: Path, pairs: list[Problem]) -> None:
    """Write problems as GSM8K's files have them."""
    rows = (json.dumps({"question": question, "answer": answer}) for question, answer in pairs)
    file.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def prepare(out: Path, train: str | None, test: str | None, vocab_size: int, seed: int) -> None:
    """Write files and models. Raises ConfigError for what cannot be used."""
    if bool(train) != bool(test):
        raise ConfigError("--train and --test go together: name both of GSM8K's files, or none")
    for name in SIZES:
        if (out / name).exists():
            raise ConfigError(f"--out={out}: already holds {name}/; remove it or name another directory")
    out.mkdir(parents=True, exist_ok=True)
    if train and test:
        learned, held_out = (read_pairs(file, "question", "answer") for file in (train, test))
    else:
        held_out = list(problems(N_TEST, seed + 1))
        learned = list(problems(N_TRAIN, seed, frozenset(question for question, _ in held_out)))
    write(out / "train.jsonl", learned)
    write(out / "test.jsonl", held_out)
    tokenizer = train_tokenizer(learned, vocab_size)
    for size in SIZES.values():
        model = new_model(size, tokenizer, seed)
        model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
        model.save_pretrained(out / size.name)
        tokenizer.save_pretrained(out / size.name)
        print(f"{size.name}: {model.num_parameters():,} parameters, untrained, in {out / size.name}")
    print(f"{len(learned)} problems to learn from, {len(held_out)} to validate on, in {out}")


def main() -> None:
    """Run :func:`prepare`; a mistake in the arguments or the data ends in one line and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="directory to write into")
    parser.add_argument("--train", help="GSM8K's training file; default: problems made here")
    parser.add_argument("--test", help="GSM8K's test file")
    parser.add_argument("--vocab-size", type=int, default=512, help="tokens of the tokenizer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of problems and weights (default: %(default)s)")
    args = parser.parse_args()
    try:
        prepare(Path(args.out), args.train, args.test, args.vocab_size, args.seed)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
