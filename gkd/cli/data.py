"""``gkd data +recipe=grpo model.path=DIR data.train_files=[...]``: what the data of a run becomes, before it runs.

Takes what ``gkd train`` takes, and needs neither Ray nor a GPU. Prints the first prompts as the student and the teacher
see them, special tokens shown; the lengths of all prompts; and how many are left out, and why. Exit codes: 0 there is
something to train on; 2 there is not, or the settings are wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gkd.errors import Parser, entry_point  # imports nothing that may be missing

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from gkd.config import Config
    from gkd.driver.inputs.preview import FilePreview, Preview
    from gkd.types import Int32, Prompt

BINS = 12
BAR = 40  # characters of the longest
SHOWN = 1500  # characters of a prompt


@entry_point
def main(arguments: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    parser = Parser("gkd data", description=__doc__)
    parser.add_argument("--rows", type=_n_rows, default=3, metavar="N", help="prompts of each file that are printed")
    parser.add_argument("overrides", nargs="*", help="as for gkd train")
    options = parser.parse_intermixed_args(arguments)
    from gkd.config.compose import compose
    from gkd.driver.inputs.preview import preview
    from gkd.observability.progress import console, log_to

    config, out = compose(options.overrides), console()
    log_to(out)
    show(preview(config, out.print), config, out, options.rows)
    return 0


def _n_rows(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a number of rows")
    return int(text)


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
    from rich.text import Text

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
    from rich.table import Table

    from gkd.driver.inputs.preview import longer_view

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
    first = f" (the first {config.data.val_limit}, data.val_limit)" if len(kept) == config.data.val_limit else ""
    out.print(f"{len(kept):,} prompts are used{first if file.use == 'val' else ''}, {n_answers:,} with an answer")
    for reason, n in file.count_left_out(longest).items():
        out.print(f"{n:,} are left out: {reason} (data.max_prompt_length={config.data.max_prompt_length})")
