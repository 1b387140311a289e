"""Questions of a set: prompts as one model is given them, with the rows that they come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from pydantic import ValidationError

from gkd.config import Data, Rollout, suggest
from gkd.config.eval_set import EvalSet
from gkd.data.prompts import PromptSet, load_prompts
from gkd.data.reader import read_rows
from gkd.errors import ConfigError
from gkd.evaluation.strategies import Columns
from gkd.types import Prompt, Sampling

PROMPT_SETTINGS = (
    "prompt_key", "answer_key", "prompt_template", "system_prompt", "apply_chat_template", "chat_template_kwargs"
)  # fmt: skip
"""Settings that a set has in common with ``data``."""
MOST_NAMED = 20  # difficulties that an error names: the column may be another one


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a set.

    ``key`` is the same for every model, and with it what is compared. ``difficulty``: the value of that column, None
    where the set names none. ``chat_template_kwargs``: the set's, for further prompts of a strategy.
    """

    key: str
    prompt: Prompt
    row: Columns
    difficulty: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions of the set ``name`` that fit, and how many were left out because they were too long.

    ``section``: where its settings are, such as ``evaluate.sets.NAME``. ``unanswered``: by file, how many were left out
    because they have no answer, and of how many.
    """

    name: str
    settings: EvalSet
    questions: Sequence[Question]
    n_too_long: int
    section: str = ""
    unanswered: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def describe_unanswered(self) -> list[str]:
        """Return in a line for each file how many of its questions are left out because they have no answer."""
        return [
            f"left out, without an answer ({_describe_key(self.settings)}): {n} of {n_all} questions of {file}"
            for file, (n, n_all) in self.unanswered.items()
        ]


def sampling_of(rollout: Rollout, settings: EvalSet) -> Sampling:
    """Return how the answers of a set are drawn."""
    return Sampling(
        settings.max_response_length or rollout.max_response_length,
        settings.temperature,
        settings.top_p,
        settings.top_k,
        settings.min_p,
        settings.presence_penalty,
        tuple(rollout.stop if settings.stop is None else settings.stop),
    )


def load_questions(
    name: str, settings: EvalSet, tokenizer: Any, longest: int, limit: int | None = None, section: str = "evaluate.sets"
) -> Questions:
    """Read a set as the model with ``tokenizer`` is asked it, at most ``limit`` questions of ``longest`` tokens each.

    Of some difficulties alone, a question has the key that it has among all. Where some have an answer, those without
    are left out, as in a run's validation on ``data.val_files``. What is counted as too long, or without an answer, is
    of all that were read: of all there are where it is not the first ones that are asked.
    Raises ConfigError for what is wrong with a file or a row, and where nothing is left to measure.
    """
    most = min([n for n in (settings.limit, limit) if n is not None], default=None)
    loaded = _load_prompts(f"{section}.{name}", settings, tokenizer, longest, most)
    last = max(prompt.id for prompt in loaded.prompts)
    rows = list(islice(chain.from_iterable(map(read_rows, settings.files)), last + 1))
    answered = any(prompt.answer is not None for prompt in loaded.prompts)
    if not answered and (settings.pass_k or not settings.rewards):
        raise ConfigError(
            f"{section}.{name}: no reference answers ({_describe_key(settings)}) and no rewards: "
            "nothing can be measured"
        )
    prompts_and_rows = [(prompt, rows[prompt.id]) for prompt in loaded.prompts]
    keys = number_repeated(loaded.prompts)
    questions, difficulties, lacking, n_of = [], set[str](), Counter[str](), Counter[str]()
    for key, (prompt, row) in zip(keys, prompts_and_rows, strict=True):
        difficulty = None
        if settings.difficulty is not None:
            difficulty = str(row.get(settings.difficulty, f"{section}.{name}.difficulty"))
            difficulties.add(difficulty)
            if settings.difficulties is not None and difficulty not in settings.difficulties:
                continue
        n_of[file := settings.files[prompt.file]] += 1
        if answered and prompt.answer is None:
            lacking[file] += 1
            continue
        questions.append(Question(key, prompt, row.values, difficulty, settings.chat_template_kwargs))
    for difficulty in settings.difficulties or ():
        if difficulty not in difficulties:
            names = sorted(difficulties)
            raise ConfigError(
                f"{section}.{name}.difficulties: no question has {difficulty}{suggest(difficulty, names)}; there are "
                f"{', '.join(names[:MOST_NAMED])}"
            )
    if not questions:
        key = _describe_key(settings)
        raise ConfigError(f"{section}.{name}.difficulties: no question of these has an answer ({key})")
    unanswered = {file: (n, n_of[file]) for file, n in lacking.items()}
    return Questions(name, settings, questions[:most], loaded.n_too_long, f"{section}.{name}", unanswered)


def _load_prompts(name: str, settings: EvalSet, tokenizer: Any, longest: int, most: int | None) -> PromptSet:
    """Return the first ``most`` prompts of a set, or all where it is not those that are asked."""
    data, limit = _data(name, settings, longest), most if settings.difficulties is None else None
    try:
        loaded = load_prompts(settings.files, data, tokenizer, limit)
        n_lacking = sum(prompt.answer is None for prompt in loaded.prompts)
        has_answers = settings.answer_key is not None or n_lacking < len(loaded.prompts)
        if limit is not None and n_lacking and has_answers:
            return load_prompts(settings.files, data, tokenizer)
    except ConfigError as error:
        text = str(error)
        for setting in PROMPT_SETTINGS:
            text = text.replace(f"data.{setting}", f"{name}.{setting}")
        raise ConfigError(text) from None
    return loaded


def _describe_key(settings: EvalSet) -> str:
    return "its own answer_key" if settings.answer_key is None else f"answer_key={settings.answer_key}"


def _data(name: str, settings: EvalSet, longest: int) -> Data:
    """Return the settings of data that a set stands for. Raises ConfigError where they do not go together."""
    prompts = {field: getattr(settings, field) for field in PROMPT_SETTINGS}
    try:
        return Data(**prompts, max_prompt_length=longest)
    except ValidationError as error:
        first = error.errors()[0]
        setting = ".".join([name, *map(str, first["loc"])])
        raise ConfigError(f"{setting}: {str(first['msg']).removeprefix('Value error, ')}") from None


def number_repeated(prompts: Iterable[Prompt]) -> list[str]:
    """Return a key for each prompt, the same in every run: its ``question``, with a number where that repeats."""
    counts: Counter[str] = Counter()
    keys = []
    for prompt in prompts:
        counts[prompt.question] += 1
        number = counts[prompt.question]
        keys.append(prompt.question if number == 1 else f"{prompt.question}-{number}")
    return keys
