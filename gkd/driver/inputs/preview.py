"""What the data of a run becomes: prompts as student and teacher see them, their lengths, and what is left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from gkd.config import Config
from gkd.data.prompts import PromptSet, load_prompts
from gkd.data.tokenizer import load_tokenizer
from gkd.driver.inputs.find import find_files, max_length, read_models
from gkd.errors import ConfigError
from gkd.scoring.prompting import teacher_prompts
from gkd.types import Prompt

FARTHEST = 8
"""Prompts are measured up to so many times the length that they may have."""

Use = Literal["train", "val"]


@dataclass(frozen=True, slots=True)
class FilePreview:
    """Prompts of one file: those that are short enough and those that are not, in the order of the file.

    ``too_long``: how many further ones have more tokens than are counted.
    """

    use: Use
    file: str
    prompts: list[Prompt]
    too_long: int

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
    """What is shown of a run's data; ``longest``: tokens that a prompt may have."""

    tokenizer: Any
    longest: int
    files: list[FilePreview]
    has_teacher: bool


def longer_view(prompt: Prompt) -> Any:
    """Return the token ids of the student or of the teacher, whichever are more."""
    return max(prompt.token_ids, prompt.teacher_prompt_ids, key=len)


def preview(config: Config, report: Callable[[str], None]) -> Preview:
    """Read the data of ``config`` as its run would, also what is too long. Raises ConfigError as the run would."""
    student, scorers, train, val = find_files(config, report)
    tokenizer = load_tokenizer(student)
    longest = max_length(config, read_models(student, scorers, tokenizer)) - config.rollout.max_response_length
    files: list[FilePreview] = []
    uses: tuple[tuple[Use, list[str]], ...] = (("train", train), ("val", val))
    for use, names in uses:
        for name in names:
            read = _read(config, use, name, tokenizer, longest)
            if config.algorithm.needs_teacher:
                kwargs = config.data.chat_template_kwargs
                sets = teacher_prompts(config.teacher, scorers, tokenizer, {use: read}, FARTHEST * longest, kwargs)
                read = sets[use]
            files.append(FilePreview(use, name, read.prompts, read.n_too_long))
    return Preview(tokenizer, longest, files, config.algorithm.needs_teacher)


def _read(config: Config, use: Use, file: str, tokenizer: Any, longest: int) -> PromptSet:
    data = config.data.model_copy(update={"max_prompt_length": FARTHEST * longest})
    limit = config.data.val_limit if use == "val" else None
    try:
        return load_prompts([file], data, tokenizer, limit)
    except ConfigError:  # where it is of the length alone, it is to name the length that the run has
        load_prompts([file], data.model_copy(update={"max_prompt_length": longest}), tokenizer, limit)
        raise
