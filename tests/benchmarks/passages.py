"""Questions whose facts are in passages, and an untrained model for them: what strategies that look further differ on.

    python tests/benchmarks/passages.py --out DIR

writes ``DIR/days1.jsonl`` to ``days3.jsonl``, sets of questions (``question``, ``answer``, ``documents``) for which the
first one, two or three of four passages are enough; ``DIR/train.jsonl`` and ``val.jsonl``, other questions as the
strategies ``adaptive`` and ``fixed_k`` put them, with the replies of one who looks as far as is needed; and
``DIR/model``. What ``+recipe=sft`` makes of it can be evaluated with both strategies and k = 4.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gkd.evaluation.retrieval import AdaptiveRetrieval, FixedRetrieval, Retrieval
from gkd.evaluation.strategies import Messages, Reply
from gkd.recipes.on_policy_distill.prepare import Size, new_model, train_tokenizer

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday")
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo")
THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps")
N_TRAIN, N_HELD_OUT = 3000, 128
SIZE = Size("model", layers=2, width=128, steps=0)


def problem(rng: random.Random, days: int) -> dict[str, Any]:
    """Make a question on the first ``days`` days, with a passage on each of four."""
    name, thing, counts = rng.choice(NAMES), rng.choice(THINGS), [rng.randint(1, 5) for _ in DAYS]
    documents = [f"{day}: {name} finds {count} {thing}." for day, count in zip(DAYS, counts, strict=True)]
    steps = " + ".join(map(str, counts[:days]))
    answer = f"{steps} = {sum(counts[:days])}\n#### {sum(counts[:days])}"
    question = f"How many {thing} does {name} find in {days} day{'s' * (days > 1)}?"
    return {"question": question, "answer": answer, "documents": documents, "days": days}


def facts(row: dict[str, Any]) -> str:
    """Return what the answer depends on: the question with the passages that it needs."""
    return " ".join([row["question"], *row["documents"][: row["days"]]])


class Oracle:
    """Replies to what a strategy asks about a problem as a model should, and keeps both."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.question: str = row["question"]
        self._row = row
        self.pairs: list[tuple[str, str]] = []

    async def __call__(
        self,
        prompt: str | Messages | None = None,
        *,
        temperature: float | None = None,
        max_response_length: int | None = None,
    ) -> Reply:
        """Ask for more until the last passage that is needed is there; note its number; answer."""
        assert isinstance(prompt, str)
        text, documents = str(self._row["answer"]), self._row["documents"]
        if prompt.endswith("Note in a sentence what helps with the answer."):
            text = next(passage for passage in reversed(documents) if passage in prompt).split()[3]
        elif "MORE" in prompt and documents[self._row["days"] - 1] not in prompt:
            text = "MORE"
        self.pairs.append((prompt, text))
        return Reply(text, len(text), False)


async def shown(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the prompts of both strategies for some problems, with the replies to them."""
    pairs: list[tuple[str, str]] = []
    config = Retrieval.Config(k=len(DAYS))
    for row in rows:
        for strategy in (AdaptiveRetrieval(config), FixedRetrieval(config)):
            oracle = Oracle(row)
            await strategy(oracle, row)
            pairs += oracle.pairs
    return pairs


def write(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows, a line each."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write sets, training rows and the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="directory to write into")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    rng, held_out = random.Random(0), set[str]()
    for days in (1, 2, 3):
        rows = [problem(rng, days) for _ in range(N_HELD_OUT)]
        held_out |= {facts(row) for row in rows}
        write(out / f"days{days}.jsonl", rows)
    drawn = (problem(rng, rng.randint(1, 3)) for _ in range(N_TRAIN))
    learned = [row for row in drawn if facts(row) not in held_out]
    pairs = asyncio.run(shown(learned))
    rng.shuffle(pairs)
    taught = [{"question": prompt, "answer": reply} for prompt, reply in pairs]
    write(out / "train.jsonl", taught[N_HELD_OUT:])
    write(out / "val.jsonl", taught[:N_HELD_OUT])
    tokenizer = train_tokenizer(pairs[:4000], vocab_size=512)
    model = new_model(SIZE, tokenizer, seed=0)
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    for part in (model, tokenizer):
        part.save_pretrained(out / SIZE.name)
    print(f"{len(taught) - N_HELD_OUT} rows to learn from and {3 * N_HELD_OUT} questions in {out}")


if __name__ == "__main__":
    main()
