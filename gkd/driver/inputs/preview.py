"""What the data of a run becomes: prompts as student and teacher see them, their lengths, and what is left out.

The questions of ``data.val_sets`` are shown as the student is asked them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gkd.config import Config
from gkd.data.prompts import LENGTHS_COUNTED, PromptSet, make_too_long_error, read_prompts
from gkd.data.rendering import drop_long
from gkd.data.tokenizer import load_tokenizer
from gkd.driver.inputs.find import (
    find_files,
    max_length,
    needs_columns,
    read_val_sets,
    see_as_teachers,
    settle_data,
)
from gkd.driver.inputs.models import find_models, read_models
from gkd.errors import ConfigError
from gkd.evaluation.questions import Questions
from gkd.types import Int32, Prompt

FARTHEST = 4 * LENGTHS_COUNTED
"""Prompts are measured up to so many times the length that they may have."""
BINS = 12
BAR = 40  # characters of the longest
SHOWN = 1500  # characters of a prompt

Use = Literal["train", "val"]


@dataclass(frozen=True, slots=True)
class FilePreview:
    """Prompts of one file: those that are short enough and those that are not, in the order of the file.

    ``too_long``: how many further ones have more tokens than are counted; ``first_id``: that of its first row;
    ``is_cut``: ``data.val_limit`` ends it.
    """

    use: Use
    file: str
    prompts: list[Prompt]
    too_long: int
    first_id: int
    is_cut: bool

    def keep_short(self, longest: int) -> list[Prompt]:
        """Return the prompts that neither student nor teacher sees as longer than ``longest`` tokens."""
        return [prompt for prompt in self.prompts if len(choose_longer_view(prompt)) <= longest]

    def count_left_out(self, longest: int) -> dict[str, int]:
        """Count the prompts that are left out, by reason."""
        n_too_long = sum(len(prompt.token_ids) > longest for prompt in self.prompts) + self.too_long
        teachers = len(self.prompts) + self.too_long - n_too_long - len(self.keep_short(longest))
        reasons = {
            f"longer than {longest:,} tokens": n_too_long,
            f"longer than {longest:,} tokens as the teacher sees it": teachers,
        }
        return {reason: n for reason, n in reasons.items() if n}


@dataclass(frozen=True, slots=True)
class Preview:
    """A view of a run's data; ``longest``: tokens that a prompt may have, and with its response ``max_length``.

    ``error``: why a run would refuse it.
    """

    tokenizer: Any
    longest: int
    max_length: int
    files: list[FilePreview]
    val_sets: tuple[Questions, ...]
    has_teacher: bool
    error: ConfigError | None


def choose_longer_view(prompt: Prompt) -> Any:
    """Return the token ids of the student or of the teacher, whichever are more."""
    return max(prompt.token_ids, prompt.teacher_prompt_ids, key=len)


@dataclass(slots=True)
class _Read:
    """Prompts of the files of one use, of up to :data:`FARTHEST` times the length that they may have.

    By a file's number: ``too_long`` counts the others, ``first_ids`` has the id of its first row. ``shortest``: tokens
    of the shortest of all; ``left``: how many short ones ``data.val_limit`` lets through after these.
    """

    prompts: list[Prompt] = field(default_factory=list)
    too_long: Counter[int] = field(default_factory=Counter)
    first_ids: dict[int, int] = field(default_factory=dict)
    shortest: int = sys.maxsize
    left: int | None = None


def preview(config: Config, report: Callable[[str], None]) -> Preview:
    """Read the data of ``config`` as its run would, also what is too long.

    Raises ConfigError as the run would for what cannot be shown.
    """
    task_inputs = find_files(config, report)
    student, scorers = find_models(config, task_inputs)
    tokenizer = load_tokenizer(student)
    models = read_models(student, scorers, tokenizer)
    most = max_length(config, models)
    longest = most - config.rollout.max_response_length
    names: dict[Use, list[str]] = {"train": task_inputs.train_files, "val": task_inputs.val_files}
    limits: dict[Use, int | None] = {"train": None, "val": config.data.val_limit}
    reads = {use: _read(config, names[use], tokenizer, longest, limits[use]) for use in names}
    every = {str(use): PromptSet(read.prompts, read.too_long.total()) for use, read in reads.items()}
    sets = see_as_teachers(config, every, scorers, tokenizer, sys.maxsize)
    files = [
        file_preview for use, read in reads.items() for file_preview in _split(use, names[use], read, sets[use].prompts)
    ]
    for file in names["val"][len(reads["val"].first_ids) :]:
        report(f"data.val_limit={config.data.val_limit}: {file} is not used")
    error: ConfigError | None = None
    val_sets: tuple[Questions, ...] = ()
    try:  # what can be shown is shown, and what it ends with comes last
        short = {str(use): _keep_short(names[use], read, sets[use], longest) for use, read in reads.items()}
        settle_data(config, short, tokenizer, models["student"])
    except ConfigError as refused:
        error = refused
    try:
        val_sets = read_val_sets(config, tokenizer, models["student"].n_tokens, most, lambda _: None)
    except ConfigError as refused:
        error = error or refused
    return Preview(tokenizer, longest, most, files, val_sets, config.algorithm.needs_teacher, error)


def _read(config: Config, files: Sequence[str], tokenizer: Any, longest: int, limit: int | None) -> _Read:
    """Read ``files`` up to the prompt that is the ``limit``-th of at most ``longest`` tokens."""
    data = config.data.model_copy(update={"max_prompt_length": FARTHEST // LENGTHS_COUNTED * longest})
    read = _Read(left=limit)
    for prompt in chain.from_iterable(read_prompts(files, data, tokenizer, needs_columns(config))):
        length = len(prompt.token_ids)
        read.first_ids.setdefault(prompt.file, prompt.id)
        read.shortest = min(read.shortest, length)
        if length > FARTHEST * longest:
            read.too_long[prompt.file] += 1
        else:
            read.prompts.append(prompt)
        if read.left is not None and length <= longest:
            read.left -= 1
            if read.left == 0:
                break
    return read


def _split(use: Use, files: Sequence[str], read: _Read, prompts: Sequence[Prompt]) -> list[FilePreview]:
    """Return the files of a use that were read, each with its own of ``prompts``."""
    by_file: dict[int, list[Prompt]] = {number: [] for number in read.first_ids}
    for prompt in prompts:
        by_file[prompt.file].append(prompt)
    previews = []
    for number, file_prompts in by_file.items():
        is_cut = read.left == 0 and number == max(by_file)
        previews.append(
            FilePreview(use, files[number], file_prompts, read.too_long[number], read.first_ids[number], is_cut)
        )
    return previews


def _keep_short(files: Sequence[str], read: _Read, prompts: PromptSet, longest: int) -> PromptSet:
    """Return the prompts that a run uses. Raises ConfigError as it would where there are none."""
    short = [prompt for prompt in prompts.prompts if len(prompt.token_ids) <= longest]
    if not short:
        raise make_too_long_error(files, longest, read.shortest)
    return drop_long(PromptSet(short, 0), longest)


def show(sets: Preview, config: Config, out: Console, n_rows: int) -> None:
    """Print ``n_rows`` prompts of each file, and what there is of each."""
    special = {*sets.tokenizer.all_special_ids, *sets.tokenizer.added_tokens_decoder}
    readable = partial(_make_readable, sets.tokenizer, special)
    for number, file in enumerate(sets.files):  # training files come first
        out.print(f"=== data.{file.use}_files: {file.file}", style="bold")
        for prompt in file.prompts[:n_rows]:
            _show_prompt(prompt, prompt.id - file.first_id + 1, sets.longest, sets.has_teacher, readable, out)
        _show_lengths([len(choose_longer_view(prompt)) for prompt in file.prompts], file.too_long, sets.longest, out)
        _show_counts(file, sets.longest, config, out)
        if (weights := config.data.train_weights) is not None and file.use == "train":
            out.print(f"{weights[number] / sum(weights):.1%} of what is trained on (data.train_weights)")
        out.print()
    for questions in sets.val_sets:
        response = questions.settings.max_response_length or config.rollout.max_response_length
        _show_set(questions, sets.max_length, sets.max_length - response, readable, out, n_rows)


def _show_set(
    questions: Questions, max_length: int, longest: int, readable: Callable[[Int32], Text], out: Console, n_rows: int
) -> None:
    """Print ``n_rows`` questions of a set, which may have ``longest`` tokens each, and what there is of it."""
    settings = questions.settings
    out.print(f"=== {questions.section}: {', '.join(settings.files)}", style="bold")
    prompts = [question.prompt for question in questions.questions]
    for prompt in prompts[:n_rows]:
        _show_prompt(prompt, prompt.id + 1, longest, False, readable, out)
    _show_lengths([len(prompt.token_ids) for prompt in prompts], questions.n_too_long, longest, out)
    used = "1 question is" if len(prompts) == 1 else f"{len(prompts):,} questions are"
    how = "once" if settings.samples == 1 else f"{settings.samples} times each"
    n_answers = sum(bool(prompt.answers) for prompt in prompts)
    out.print(f"{used} asked {how}, at temperature {settings.temperature:g}, {n_answers:,} with an answer")
    if n := questions.n_too_long:
        room = f"answers have {max_length - longest:,} of {max_length:,} tokens"
        out.print(f"{n:,} {'is' if n == 1 else 'are'} left out: longer than {longest:,} tokens ({room})")
    for line in questions.describe_unanswered():
        out.print(line)
    out.print()


def _show_prompt(
    prompt: Prompt, row: int, longest: int, has_teacher: bool, readable: Callable[[Int32], Text], out: Console
) -> None:
    left_out = "" if len(prompt.token_ids) <= longest else ", left out"
    form = "text as it is" if prompt.messages is None else f"{len(prompt.messages)} messages"
    out.print(f"row {row}: {form}, {len(prompt.token_ids):,} tokens{left_out}", style="bold")
    out.print(readable(prompt.token_ids))
    if has_teacher and prompt.teacher_ids is not None:
        of = "the teacher" if prompt.teacher is None else f"the teacher {prompt.teacher}"
        out.print(f"as {of} sees it, {len(prompt.teacher_ids):,} tokens:", style="bold")
        out.print(readable(prompt.teacher_ids))
    elif has_teacher:
        out.print("the teacher sees the same", style="bold")
    if prompt.answers:
        out.print("answer: " + " | ".join(map(repr, prompt.answers)), style="bold")
    out.print()


def _make_readable(tokenizer: Any, special: set[int], token_ids: Int32) -> Text:
    """Return the text of tokens, the special ones in another colour; of a long one beginning and end."""
    text = Text(tokenizer.decode(token_ids.tolist(), skip_special_tokens=False))
    words = {tokenizer.decode([token], skip_special_tokens=False) for token in set(token_ids.tolist()) & special}
    text.highlight_words([word for word in words if word.strip()], "cyan")
    if len(text) <= SHOWN:
        return text
    return Text.assemble(
        text[: SHOWN // 2], (f" ... {len(text) - SHOWN:,} characters ... ", "dim"), text[-SHOWN // 2 :]
    )


def _show_lengths(lengths: Sequence[int], too_long: int, longest: int, out: Console) -> None:
    """Print a histogram of lengths in tokens up to ``longest``, and how many are longer; ``too_long`` more are."""
    short = [length for length in lengths if length <= longest]
    start, n_lengths = (min(short), max(short) - min(short) + 1) if short else (0, 0)
    width = max(1, -(-n_lengths // BINS))
    counts = [0] * -(-n_lengths // width)
    for length in short:
        counts[(length - start) // width] += 1
    beyond = len(lengths) + too_long - len(short)
    table = Table(title="lengths", title_justify="left", show_header=False, box=None, pad_edge=False)
    lows = range(start, start + n_lengths, width)
    names = [f"{low:,}" if width == 1 else f"{low:,}-{min(low + width - 1, longest):,}" for low in lows]
    rows = [(f"{name} tokens", n) for name, n in zip(names, counts, strict=True)]
    rows += [(f"more than {longest:,}", beyond)] if beyond else []
    most = max(n for _, n in rows)
    for name, n in rows:
        table.add_row(name, f"{n:,}", "█" * round(BAR * n / most) or ("▏" if n else ""))
    out.print(table)


def _show_counts(file: FilePreview, longest: int, config: Config, out: Console) -> None:
    prompts = file.keep_short(longest)
    n_answers = sum(bool(prompt.answers) for prompt in prompts)
    limit = f" (data.val_limit={config.data.val_limit})" if file.is_cut else ""
    used = "1 prompt is" if len(prompts) == 1 else f"{len(prompts):,} prompts are"
    out.print(f"{used} used{limit}, {n_answers:,} with an answer")
    bound = f"data.max_prompt_length={config.data.max_prompt_length}"
    if longest < config.data.max_prompt_length:
        response = f"rollout.max_response_length={config.rollout.max_response_length}"
        bound += f", of which the models' positions leave {longest:,} beside {response}"
    for reason, n in file.count_left_out(longest).items():
        out.print(f"{n:,} {'is' if n == 1 else 'are'} left out: {reason} ({bound})")
