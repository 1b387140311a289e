"""Trains models of the task, supervised, and writes them in Hugging Face format.

Run as a program by :class:`gkd.recipes.sort_digits.task.SortDigits`, so that the driver itself does not train. It ends
when its stdin closes, that is, when the process that started it is gone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from gkd.cluster import host
from gkd.data.cache import make_entry
from gkd.data.task import ReportFn
from gkd.errors import RunFailed

from . import sorting
from .task import ModelRecipe

N_EXAMINED = 256  # fresh prompts that measure the accuracy
EXAMINED_EVERY = 2  # steps, where the accuracy ends the training
REPORTED_EVERY = 25  # steps
RISING_STEPS = 10  # of the learning rate, to its peak


@dataclass(frozen=True, slots=True)
class WarmedUp:
    """What came of a training: the steps made and the share of prompts answered exactly."""

    steps: int
    accuracy: float


def new_model(recipe: ModelRecipe) -> Any:
    """Return a randomly initialised LlamaForCausalLM of the recipe's size, float32, embeddings not tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(recipe.seed)
    return LlamaForCausalLM(LlamaConfig(**recipe.llama_config()))


def train(model: Any, recipe: ModelRecipe, report: ReportFn) -> WarmedUp:
    """Train on fresh prompts that are not held out, with the loss on the response's tokens only."""
    rng = np.random.default_rng((recipe.seed, recipe.digits))
    exam = _sequences(rng, N_EXAMINED, recipe.digits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_share(step, recipe))
    began, accuracy = time.monotonic(), 0.0
    for step in range(1, recipe.steps + 1):
        loss = _loss(model, _sequences(rng, recipe.batch, recipe.digits), recipe)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        is_last, is_reported = step == recipe.steps, step % REPORTED_EVERY == 0
        if is_last or is_reported or (recipe.stop_at is not None and step % EXAMINED_EVERY == 0):
            accuracy = exact_accuracy(model, exam, recipe)
            is_last = is_last or (recipe.stop_at is not None and accuracy >= recipe.stop_at)
        if is_last or is_reported:
            left = 0.0 if is_last else (time.monotonic() - began) / step * (recipe.steps - step)
            report(f"{recipe.name}: {_progress(step, recipe, loss.item(), accuracy, left)}")
        if is_last:
            return WarmedUp(step, accuracy)
    raise AssertionError("the last step returns")


def _progress(step: int, recipe: ModelRecipe, loss: float, accuracy: float, left: float) -> str:
    bound = "at most " if recipe.stop_at is not None else ""
    return f"step {step} of {bound}{recipe.steps}, loss {loss:.3f}, {accuracy:.0%} exact, {bound}{left:.0f} s left"


def _lr_share(step: int, recipe: ModelRecipe) -> float:
    """Return the share of the peak learning rate: a linear rise, then constant (``stop_at``) or half a cosine."""
    rising = min(1.0, (step + 1) / RISING_STEPS)
    if recipe.stop_at is not None:
        return rising
    return rising * 0.5 * (1.0 + float(np.cos(np.pi * min(1.0, step / recipe.steps))))


def _sequences(rng: np.random.Generator, n: int, digits: int) -> Tensor:
    return torch.from_numpy(sorting.token_rows(sorting.draw(rng, n, digits, "train")))


def _response_logits(model: Any, ids: Tensor, recipe: ModelRecipe) -> tuple[Tensor, Tensor]:
    """Return logits [n, digits + 1, vocabulary] that predict the response, and its tokens [n, digits + 1]."""
    start = sorting.n_prompt_tokens(recipe.digits)
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    return model.lm_head(hidden[:, start - 1 :]), ids[:, start:]


def _loss(model: Any, ids: Tensor, recipe: ModelRecipe) -> Tensor:
    logits, targets = _response_logits(model, ids, recipe)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def exact_accuracy(model: Any, ids: Tensor, recipe: ModelRecipe) -> float:
    """Return share of sequences whose response greedy decoding gives exactly.

    Greedy decoding follows the right response if and only if every one of its tokens is the most likely one after the
    right tokens before it, so one forward pass over whole sequences measures it.
    """
    logits, targets = _response_logits(model, ids, recipe)
    return float((logits.argmax(-1) == targets).all(1).float().mean())


def make_model(cache: Path, recipe: ModelRecipe, report: ReportFn) -> Path:
    """Train the recipe's model into the cache unless it is there, and return its directory."""
    directory = recipe.directory(cache)
    with make_entry(directory, report) as unfinished:
        if unfinished is not None:
            report(f"{recipe.name}: training a {recipe.layers}-layer {recipe.width}-wide model for the built-in task")
            model = new_model(recipe)
            trained = train(model, recipe, report)
            model.generation_config.update(do_sample=False, eos_token_id=sorting.EOS_ID, pad_token_id=sorting.PAD_ID)
            model.save_pretrained(unfinished)
            sorting.make_tokenizer().save_pretrained(unfinished)
            (unfinished / "trained.json").write_text(
                json.dumps({"steps": trained.steps, "accuracy": trained.accuracy}), encoding="utf-8"
            )
            report(f"{recipe.name}: {trained.accuracy:.1%} exact after {trained.steps} steps, kept in {directory}")
    return directory


def _end_with_parent() -> None:
    """Turn SIGTERM, and the end of stdin, into an orderly end that removes what is unfinished."""

    def end(*_: object) -> None:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, end)

    def watch() -> None:
        # Not through sys.stdin: its lock, held here, would abort the interpreter when it ends.
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Make the models of ``CACHE RECIPES_JSON``, a directory and a list of :class:`ModelRecipe`."""
    _end_with_parent()
    disable_progress_bar()
    torch.set_num_threads(host.cores())
    try:
        for recipe in json.loads(sys.argv[2]):
            make_model(Path(sys.argv[1]), ModelRecipe(**recipe), lambda line: print(line, flush=True))
    except RunFailed as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
