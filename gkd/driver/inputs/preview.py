"""What the data of a run becomes: prompts as student and teacher see them, their lengths, and what is left out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gkd.config import Config
from gkd.data.prompts import PromptSet, load_prompts
from gkd.data.tokenizer import load_tokenizer
from gkd.driver.inputs.find import find_files, load_data, max_length, read_models
from gkd.errors import ConfigError
from gkd.scoring.prompting import teacher_prompts
from gkd.types import Int32, Prompt

log = logging.getLogger("gkd")
FARTHEST = 8
"""Prompts are measured up to so many times the length that they may have."""
BINS = 12
BAR = 40  # characters of the longest
SHOWN = 1500  # characters of a prompt

Use = Literal["train", "val"]


@dataclass(frozen=True, slots=True)
class FilePreview:
    """Prompts of one file: those that are short enough and those that are not, in the order of the file.

    ``too_long``: how many further ones have more tokens than are counted; ``is_cut``: ``data.val_limit`` ends it.
    """

    use: Use
    file: str
    prompts: list[Prompt]
    too_long: int
    is_cut: bool = False

    def keep_short(self, longest: int) -> list[Prompt]:
        """Return the prompts that neither student nor teacher sees as longer than ``longest`` tokens."""
        return [prompt for prompt in self.prompts if len(longer_view(prompt)) <= longest]

    def count_left_out(self, longest: int) -> dict[str, int]:
        """Count the prompts that are left out, by reason."""
        own = sum(len(prompt.token_ids) > longest for prompt in self.prompts) + self.too_long
        teachers = len(self.prompts) + self.too_long - own - len(self.keep_short(longest))
        reasons = {
            f"longer than {longest:,} tokens": own,
            f"longer than {longest:,} tokens as the teacher sees it": teachers,
        }
        return {reason: n for reason, n in reasons.items() if n}


@dataclass(frozen=True, slots=True)
class Preview:
    """A view of a run's data; ``longest``: tokens that a prompt may have. ``error``: why a run would refuse it."""

    tokenizer: Any
    longest: int
    files: list[FilePreview]
    has_teacher: bool
    error: ConfigError | None


def longer_view(prompt: Prompt) -> Any:
    """Return the token ids of the student or of the teacher, whichever are more."""
    return max(prompt.token_ids, prompt.teacher_prompt_ids, key=len)


def preview(config: Config, report: Callable[[str], None]) -> Preview:
    """Read the data of ``config`` as its run would, also what is too long.

    Raises ConfigError as the run would for what cannot be shown.
    """
    student, scorers, train, val = find_files(config, report)
    tokenizer = load_tokenizer(student)
    models = read_models(student, scorers, tokenizer)
    whole = max_length(config, models)
    longest, left = whole - config.rollout.max_response_length, config.data.val_limit
    files: list[FilePreview] = []
    uses: tuple[tuple[Use, list[str]], ...] = (("train", train), ("val", val))
    for use, names in uses:
        for name in names:
            if use == "val" and left == 0:
                report(f"data.val_limit={config.data.val_limit}: {name} is not used")
                continue
            read, is_cut = _read(config, name, tokenizer, longest), False
            if use == "val" and left is not None:
                read, left = _take_first(read, left, longest)
                is_cut = left == 0
            if config.algorithm.needs_teacher:
                kwargs = config.data.chat_template_kwargs
                sets = teacher_prompts(config.teacher, scorers, tokenizer, {use: read}, FARTHEST * longest, kwargs)
                read = sets[use]
            files.append(FilePreview(use, name, read.prompts, read.n_too_long, is_cut))
    error = None
    try:
        load_data(config, {"train": train, "val": val}, scorers, tokenizer, models["student"], whole, log.debug)
    except ConfigError as refused:
        error = refused
    return Preview(tokenizer, longest, files, config.algorithm.needs_teacher, error)


def _read(config: Config, file: str, tokenizer: Any, longest: int) -> PromptSet:
    data = config.data.model_copy(update={"max_prompt_length": FARTHEST * longest})
    try:
        return load_prompts([file], data, tokenizer)
    except ConfigError:  # where it is of the length alone, it is to name the length that the run has
        load_prompts([file], data.model_copy(update={"max_prompt_length": longest}), tokenizer)
        raise


def _take_first(read: PromptSet, n: int, longest: int) -> tuple[PromptSet, int]:
    """Return the prompts up to the ``n``-th that is short enough, and how many such ones are left to take."""
    taken: list[Prompt] = []
    for prompt in read.prompts:
        if n == 0:
            break
        taken.append(prompt)
        n -= len(prompt.token_ids) <= longest
    return PromptSet(taken, read.n_too_long), n


def show(sets: Preview, config: Config, out: Console, n_rows: int) -> None:
    """Print ``n_rows`` prompts of each file, and what there is of each."""
    special = {*sets.tokenizer.all_special_ids, *sets.tokenizer.added_tokens_decoder}
    for number, file in enumerate(sets.files):  # training files come first
        out.print(f"=== data.{file.use}_files: {file.file}", style="bold")
        for prompt in file.prompts[:n_rows]:
            _show_prompt(prompt, sets, special, out)
        _show_lengths(file, sets.longest, out)
        _show_counts(file, sets.longest, config, out)
        if (weights := config.data.train_weights) is not None and file.use == "train":
            out.print(f"{weights[number] / sum(weights):.1%} of what is trained on (data.train_weights)")
        out.print()


def _show_prompt(prompt: Prompt, sets: Preview, special: set[int], out: Console) -> None:
    left_out = "" if len(prompt.token_ids) <= sets.longest else ", left out"
    form = "text as it is" if prompt.messages is None else f"{len(prompt.messages)} messages"
    out.print(f"row {prompt.id + 1}: {form}, {len(prompt.token_ids):,} tokens{left_out}", style="bold")
    out.print(_make_readable(prompt.token_ids, sets.tokenizer, special))
    if sets.has_teacher and prompt.teacher_ids is not None:
        of = "the teacher" if prompt.teacher is None else f"the teacher {prompt.teacher}"
        out.print(f"as {of} sees it, {len(prompt.teacher_ids):,} tokens:", style="bold")
        out.print(_make_readable(prompt.teacher_ids, sets.tokenizer, special))
    elif sets.has_teacher:
        out.print("the teacher sees the same", style="bold")
    if prompt.answers:
        out.print("answer: " + " | ".join(map(repr, prompt.answers)), style="bold")
    out.print()


def _make_readable(token_ids: Int32, tokenizer: Any, special: set[int]) -> Text:
    """Return the text of tokens, the special ones in another colour; of a long one beginning and end."""
    text = Text(tokenizer.decode(token_ids.tolist(), skip_special_tokens=False))
    words = {tokenizer.decode([token], skip_special_tokens=False) for token in set(token_ids.tolist()) & special}
    text.highlight_words([word for word in words if word.strip()], "cyan")
    if len(text) <= SHOWN:
        return text
    return Text.assemble(
        text[: SHOWN // 2], (f" ... {len(text) - SHOWN:,} characters ... ", "dim"), text[-SHOWN // 2 :]
    )


def _show_lengths(file: FilePreview, longest: int, out: Console) -> None:
    """Print a histogram of lengths in tokens, as the longer view has them, up to what a prompt may have."""
    lengths = [len(longer_view(prompt)) for prompt in file.prompts]
    width = max(1, -(-min(max(lengths), longest) // BINS))
    counts = [0] * -(-min(max(lengths), longest) // width)
    for length in lengths:
        if length <= longest:
            counts[(length - 1) // width] += 1
    beyond = len(lengths) + file.too_long - sum(counts)
    table = Table(title="lengths", title_justify="left", show_header=False, box=None, pad_edge=False)
    rows = [(f"{i * width + 1:,}-{min((i + 1) * width, longest):,} tokens", n) for i, n in enumerate(counts)]
    rows += [(f"more than {longest:,}", beyond)] if beyond else []
    most = max(n for _, n in rows)
    for name, n in rows:
        table.add_row(name, f"{n:,}", "█" * round(BAR * n / most) or ("▏" if n else ""))
    out.print(table)


def _show_counts(file: FilePreview, longest: int, config: Config, out: Console) -> None:
    kept = file.keep_short(longest)
    n_answers = sum(bool(prompt.answers) for prompt in kept)
    limit = f" (data.val_limit={config.data.val_limit})" if file.is_cut else ""
    out.print(f"{len(kept):,} prompts are used{limit}, {n_answers:,} with an answer")
    for reason, n in file.count_left_out(longest).items():
        out.print(f"{n:,} are left out: {reason} (data.max_prompt_length={config.data.max_prompt_length})")
