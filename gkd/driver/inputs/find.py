"""Models and data of a run, found and checked before Ray starts."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gkd.config import Config
from gkd.config.groups import model_setting, scorer_group
from gkd.config.registry import shorten_name
from gkd.config.rewards import REWARDS, required_columns
from gkd.config.top_k import required_top_k, top_k_for_validation
from gkd.data.answers import turn_end, with_answers, with_turn_end
from gkd.data.layouts import VERL_ANSWER
from gkd.data.model_info import ModelInfo, fingerprint_weights
from gkd.data.prompts import PromptSet, fingerprint, load_prompts
from gkd.data.reader import read_rows
from gkd.data.row import Row
from gkd.data.stream import PromptStream
from gkd.data.task import TaskInputs, make_inputs, require_teacher
from gkd.data.templates import warn_of_raw_text
from gkd.data.tokenizer import load_tokenizer, tokenizer_hash
from gkd.driver.inputs.models import find_models, find_reward_model, read_models, require_usable
from gkd.errors import ConfigError
from gkd.evaluation.questions import Questions, load_questions
from gkd.evaluation.rating import reward_settings
from gkd.rewards.completion import RewardFunction
from gkd.scoring.prompting import teacher_prompts
from gkd.types import Prompt

log = logging.getLogger("gkd")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Directories of the student and, by name, of the models that score; tokenized prompts; what they share.

    ``model`` describes the student; ``max_length`` is the number of tokens that a prompt and its response may have
    together. ``teacher_vocabulary``: rows of logits that the student and every teacher have. Teachers score these, so
    that all give the same K; models of one tokenizer differ in rows that no token has.
    """

    student: str
    scorers: dict[str, str]
    tokenizer: Any
    tokenizer_hash: str
    train: PromptSet
    val: PromptSet
    model: ModelInfo
    max_length: int
    teacher_vocabulary: int
    val_sets: tuple[Questions, ...] = ()
    """``data.val_sets``."""

    def fingerprints(self, config: Config) -> dict[str, str]:
        """Return fingerprints of models, and of prompts that are trained and validated on, for a run that goes on.

        Models are by the settings that name them.
        """
        groups = config.groups()
        scorers = {model_setting(name): p for name, p in self.scorers.items() if scorer_group(name) in groups}
        models = {name: fingerprint_weights(p) for name, p in {"model.path": self.student, **scorers}.items()}
        sets = {f"val_sets.{s.name}": fingerprint([q.prompt for q in s.questions]) for s in self.val_sets}
        return {"train": fingerprint(self.train.prompts), "val": fingerprint(self.val.prompts), **sets, **models}


def find_inputs(config: Config, report: Callable[[str], None]) -> Inputs:
    """Have the task make models and data, or check the user's own. Raises ConfigError for what cannot be used."""
    _require_transfer(config)
    task_inputs = find_files(config, report)
    student, scorers = find_models(config, task_inputs)
    tokenizer = load_tokenizer(student)
    models = read_models(student, scorers, tokenizer)
    require_usable(config, student, scorers)
    longest = max_length(config, models)
    scorers |= find_reward_model(config)
    if config.algorithm.needs_teacher:
        for require_k in (required_top_k, top_k_for_validation):
            require_k(config, models["student"].vocabulary)  # refuses now what the teacher could not give
    files = {"train": task_inputs.train_files, "val": task_inputs.val_files}
    prompts, student_info = load_data(config, files, scorers, tokenizer, models["student"], longest, report)
    val_sets = read_val_sets(config, tokenizer, models["student"].n_tokens, longest, report)
    # A set may go through the chat template where the prompts of training do not: its answers end as turns do.
    student_info = with_turn_end(student_info, turn_end([q.prompt for s in val_sets for q in s.questions], tokenizer))
    return Inputs(
        student,
        scorers,
        tokenizer,
        tokenizer_hash(tokenizer),
        prompts["train"],
        prompts["val"],
        student_info,
        longest,
        min(model.vocabulary for name, model in models.items() if name != "reference"),
        val_sets,
    )


def load_data(
    config: Config,
    files: Mapping[str, list[str]],
    scorers: Mapping[str, str],
    tokenizer: Any,
    student: ModelInfo,
    longest: int,
    report: Callable[[str], None],
) -> tuple[dict[str, PromptSet], ModelInfo]:
    """Load the prompts in ``files``, by train and val, with what is learned from; states what is left out.

    Returns them and the student with the end of turns that they show. Raises ConfigError for what cannot be used.
    """
    data = config.data.model_copy(update={"max_prompt_length": longest - config.rollout.max_response_length})
    limits, columns = {"train": None, "val": config.data.val_limit}, needs_columns(config)
    read = {name: load_prompts(paths, data, tokenizer, limits[name], columns) for name, paths in files.items()}
    if len(read["val"].prompts) == config.data.val_limit:
        for file in files["val"][read["val"].prompts[-1].file + 1 :]:
            report(f"data.val_limit={config.data.val_limit}: {file} is not used")
    prompts = see_as_teachers(config, read, scorers, tokenizer, data.max_prompt_length)
    for name, loaded in prompts.items():
        if loaded.n_too_long:
            n, longest = loaded.n_too_long, data.max_prompt_length
            left_out = f"{n} of {n + len(loaded.prompts)} prompts left out, longer than {longest} tokens"
            report(f"data.{name}_files: {left_out}")
    return settle_data(config, prompts, tokenizer, student)


def needs_columns(config: Config) -> bool:
    """Return whether prompts keep all of their rows."""
    return bool(config.algorithm.policy_weight and config.reward.functions_needing_columns())


def settle_data(
    config: Config, prompts: dict[str, PromptSet], tokenizer: Any, student: ModelInfo
) -> tuple[dict[str, PromptSet], ModelInfo]:
    """Return prompts, by train and val, with the answers that are learned from; otherwise as :func:`load_data`."""
    _require_answers(config, prompts["train"])
    _require_columns(config, prompts)
    PromptStream(prompts["train"].prompts, config.trainer.seed, config.data.train_weights)  # refuses now what has none
    end = turn_end([prompt for loaded in prompts.values() for prompt in loaded.prompts], tokenizer)
    student_with_end = with_turn_end(student, end)
    if config.algorithm.learns_answers:
        limit = config.rollout.max_response_length
        for name in ("train", "val") if config.algorithm.is_supervised else ("train",):
            with_answer = with_answers(prompts[name].prompts, tokenizer, student_with_end, end, limit)
            prompts[name] = replace(prompts[name], prompts=with_answer)
    by_setting = {f"data.{name}_files": loaded.prompts for name, loaded in prompts.items()}
    _require_rows(by_setting, tokenizer, student.n_tokens)
    return prompts, student_with_end


def see_as_teachers(
    config: Config, prompts: Mapping[str, PromptSet], scorers: Mapping[str, str], tokenizer: Any, longest: int
) -> dict[str, PromptSet]:
    """Return prompts, by train and val, as teachers see them too, those of at most ``longest`` tokens."""
    files = {f"{name}_files": loaded.prompts for name, loaded in prompts.items()}
    warn_of_raw_text(f"model.path={config.model.path}", tokenizer, config.data, "data", files)
    _require_known_teachers(config, [prompt for loaded in prompts.values() for prompt in loaded.prompts])
    if not config.algorithm.needs_teacher:
        return dict(prompts)
    teachers = {name: path for name, path in scorers.items() if name.startswith("teacher")}
    kwargs = config.data.chat_template_kwargs
    return teacher_prompts(config.teacher, teachers, tokenizer, prompts, longest, kwargs)


def read_val_sets(
    config: Config, tokenizer: Any, n_tokens: int, max_length: int, report: Callable[[str], None]
) -> tuple[Questions, ...]:
    """Read ``data.val_sets``, each as the student is asked it; ``n_tokens``: how many tokens the student has.

    Raises ConfigError for what cannot be asked or measured.
    """
    sets = []
    for name, settings in config.data.val_sets.items():
        section, response = f"data.val_sets.{name}", settings.max_response_length or config.rollout.max_response_length
        if response >= max_length:
            raise ConfigError(
                f"{section}.max_response_length={response} leaves no room for a question: the engines take "
                f"{max_length} tokens (data.max_prompt_length + rollout.max_response_length, at most the model's)"
            )
        questions = load_questions(name, settings, tokenizer, max_length - response, section="data.val_sets")
        reward_settings(config, questions)
        if questions.n_too_long:
            report(f"{section}: {questions.n_too_long} questions are too long and left out")
        for line in questions.describe_unanswered():
            report(f"{section}: {line}")
        prompts = [q.prompt for q in questions.questions]
        warn_of_raw_text(f"model.path={config.model.path}", tokenizer, settings, section, {"files": prompts})
        _require_rows({f"{section}.files": prompts}, tokenizer, n_tokens)
        sets.append(questions)
    return tuple(sets)


def _require_transfer(config: Config) -> None:
    """Raise ConfigError for a way of weights that cannot be here."""
    weights = config.weights
    if (lacking := weights.transfer_class.find_lacking()) is not None:
        raise ConfigError(f"weights.transfer={weights.transfer}: {lacking}")


def _require_known_teachers(config: Config, prompts: list[Prompt]) -> None:
    """Raise ConfigError for a prompt that is for a teacher that there is not."""
    for prompt in prompts:
        if prompt.teacher is not None and prompt.teacher not in config.teacher.models:
            raise ConfigError(
                f"data.teacher_key={config.data.teacher_key}: a prompt is for the teacher {prompt.teacher!r}; "
                f"teacher.models has {', '.join(config.teacher.models)}"
            )


def find_files(config: Config, report: Callable[[str], None]) -> TaskInputs:
    """Return the models and files of data that settings name, or that the task makes.

    Raises ConfigError for models of which only the size is given.
    """
    for setting, model in (("model", config.model), ("teacher.model", config.teacher.model)):
        if model.size is not None:
            raise ConfigError(f"{setting}.size={model.size} is for python -m gkd.plan; a run needs {setting}.path")
    if config.model.path is not None:
        return TaskInputs(config.model.path, config.teacher.model.path, config.data.train_files, config.data.val_files)
    made = make_inputs(config, report)
    require_teacher(config, made.teacher is not None)
    return made


def require_files(config: Config) -> None:
    """Raise ConfigError for a model or a file of data that a run of ``config`` would not find; a task makes its own.

    Of files the first row is read: :func:`find_inputs` looks at all of them.
    """
    _require_transfer(config)
    files = [file for val_set in config.data.val_sets.values() for file in val_set.files]
    if not config.uses_task:
        files += [*config.data.train_files, *config.data.val_files]
    for file in files:
        next(read_rows(file))
    if not config.uses_task:
        find_models(config, find_files(config, log.info))
    find_reward_model(config)


def _require_answers(config: Config, train: PromptSet) -> None:
    """Raise ConfigError where a prompt that is trained on lacks the answer that is compared with or learned from."""
    comparing = config.reward.functions_needing_answers() if config.algorithm.policy_weight else []
    why = f"reward.functions={comparing[0]} compares with it" if comparing else "it is to be learned from"
    if not comparing and not config.algorithm.learns_answers:
        return
    lacking = [prompt for prompt in train.prompts if prompt.answer is None]
    if len(lacking) == len(train.prompts) and config.data.answer_key is None:
        raise ConfigError(
            f"data.answer_key is not set, the training rows have no text or number as {VERL_ANSWER}, and {why}"
        )
    if lacking:
        raise ConfigError(
            f"data.answer_key={config.data.answer_key}: {len(lacking)} of {len(train.prompts)} training prompts have "
            f"no answer, and {why}; the first is row {lacking[0].id + 1} of data.train_files"
        )


def _require_rows(sets: Mapping[str, Iterable[Prompt]], tokenizer: Any, n_tokens: int) -> None:
    """Raise ConfigError for a prompt, of ``sets`` by setting, with a token that is not among the first ``n_tokens``."""
    if max(tokenizer.get_vocab().values()) < n_tokens:
        return
    for setting, prompts in sets.items():
        for prompt in prompts:
            views = (prompt.token_ids, prompt.answer_ids, prompt.teacher_ids)
            highest = max(int(ids.max()) for ids in views if ids is not None)
            if highest >= n_tokens:
                token = tokenizer.convert_ids_to_tokens(highest)
                raise ConfigError(
                    f"row {prompt.id + 1} of {setting} has the token {token!r} ({highest}), and not all models have "
                    f"more than {n_tokens} rows of logits"
                )


def _require_columns(config: Config, prompts: Mapping[str, PromptSet]) -> None:
    """Raise ConfigError for a row that lacks a column which a reward states that it needs."""
    for name in config.reward.functions if config.algorithm.policy_weight else ():
        reward = REWARDS.load(name)
        columns = {f"{shorten_name(name)}({column})": column for column in required_columns(reward)}
        if isinstance(reward, type) and issubclass(reward, RewardFunction):
            columns |= reward.required_columns(config.reward.settings_of(name))
        for data, loaded in prompts.items():
            for prompt, (setting, column) in itertools.product(loaded.prompts, columns.items()):
                place = f"reward.functions={name}: row {prompt.id + 1} of data.{data}_files"
                Row(dict(prompt.columns), place).get(column, setting)


def max_length(config: Config, models: dict[str, ModelInfo]) -> int:
    """Return max_prompt_length + max_response_length, or as many positions as student and teacher both have.

    Beyond some length LongRoPE gives every token of a sequence other frequencies: in transformers where one of a batch
    is as long, in vLLM where one could be. Only up to there a sequence's log-probabilities are its own.
    """
    length, shortest = config.data.max_prompt_length + config.rollout.max_response_length, ""
    for name, model in models.items():
        if model.rope_positions is not None and model.rope_positions < length:
            length, shortest = model.rope_positions, name
            log.warning("the %s's LongRoPE: prompt and response have at most %d tokens together", name, length)
        if model.positions is not None and model.positions < length:
            length, shortest = model.positions, name
    if length <= config.rollout.max_response_length:
        raise ConfigError(
            f"rollout.max_response_length={config.rollout.max_response_length} leaves no room for a prompt: "
            f"the {shortest} has {length} positions"
        )
    return length
