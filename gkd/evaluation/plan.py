"""What is to be asked: every model, set and strategy, which answers are there already and which are missing."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gkd.config import Config
from gkd.config.eval_set import EvalSet
from gkd.config.evaluation import DEFAULT_STRATEGY, STRATEGIES
from gkd.config.own_code import source_digest
from gkd.config.registry import file_of, shorten_name
from gkd.data.answers import turn_end, with_turn_end
from gkd.data.model_info import ModelInfo
from gkd.data.templates import warn_of_raw_text
from gkd.data.tokenizer import check_causal_lm, load_tokenizer
from gkd.errors import ConfigError
from gkd.evaluation.answering import AnswerJob
from gkd.evaluation.answers import AnswerKey, AnswerLog, fingerprint
from gkd.evaluation.endpoint import LONGEST, Bytes, EndpointModel
from gkd.evaluation.engines import LocalModel
from gkd.evaluation.questions import Question, Questions, load_questions, sampling_of
from gkd.evaluation.rating import reward_settings
from gkd.evaluation.reloading import FurtherWeights
from gkd.evaluation.results import name_file
from gkd.inference.vllm_models import STUDENT_REMEDY, require_vllm_runs
from gkd.types import Sampling

START = "step_0"
"""What the model is called that a run began with."""
QUICK = 5
"""Questions of each set in a quick check."""


@dataclass(frozen=True)
class Measurement:
    """One model on one set with one strategy, by its name in the settings."""

    model: LocalModel | EndpointModel
    questions: Questions
    strategy: str
    sampling: Sampling
    identity: str
    """The strategy as answers are kept by."""
    computed_by: str = ""
    """Engine and type of numbers of a local model, as answers are kept by; empty for those that are the default."""

    @property
    def label(self) -> str:
        """The strategy as tables call it."""
        return shorten_name(self.strategy)

    @property
    def jobs(self) -> list[AnswerJob]:
        """Every answer that is wanted, all first samples first: scores of all questions come early."""
        samples = self.questions.settings.samples
        return [AnswerJob(question, index) for index in range(samples) for question in self.questions.questions]

    def key(self, job: AnswerJob, seed: int) -> AnswerKey:
        """Return what the answer of a job depends on."""
        question = job.question
        draws = self.sampling.temperature > 0 or self.label != DEFAULT_STRATEGY  # which may have its own temperature
        return AnswerKey(
            self.model.fingerprint,
            self.questions.name,
            question.key,
            job.index,
            _digest(question, self.sampling, seed if draws else 0, self.computed_by),
            self.identity,
        )

    def find_missing_jobs(self, log: AnswerLog, seed: int) -> list[AnswerJob]:
        """Return the jobs whose answers are not in the log."""
        return [job for job in self.jobs if self.key(job, seed) not in log.answers]


def _digest(question: Question, sampling: Sampling, seed: int, computed_by: str) -> str:
    prompt = hashlib.sha256(question.prompt.token_ids.tobytes()).hexdigest()
    parts = [sampling.max_tokens, sampling.temperature, sampling.top_p, prompt, seed]
    # Of a strategy's own prompts, and of endpoints, whose templates nobody knows.
    further: dict[str, Any] = {name: getattr(sampling, name) for name in ("top_k", "min_p", "presence_penalty", "stop")}
    further["chat_template_kwargs"] = question.chat_template_kwargs
    further["tools"] = question.prompt.tools
    further["computed_by"] = computed_by
    if used := {name: value for name, value in further.items() if value}:  # earlier answers have none of them
        parts.append(json.dumps(used))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _identity(config: Config, strategy: str) -> str:
    """Return what of a strategy an answer depends on: its name and settings, and the source of one's own."""
    settings = config.evaluate.settings_of(strategy)
    text = "" if settings is None else " ".join(f"{key}={value}" for key, value in settings.model_dump().items())
    return f"{_name_of(strategy)} {text}".strip()


def _name_of(strategy: str) -> str:
    if strategy in STRATEGIES.names():
        return strategy
    implementation = STRATEGIES.load(strategy)
    if inspect.isclass(implementation) or inspect.isroutine(implementation):
        source = inspect.getsourcefile(implementation)
    else:  # an object, such as a partial function: what it is made with is where it is named
        source = str(file_of(strategy) or sys.modules[strategy.rpartition(":")[0]].__file__)
    digest = hashlib.sha256(b"").hexdigest() if source is None else source_digest(Path(source))
    return f"{shorten_name(strategy)}@{digest[:8]}"


def strategy_of(config: Config, name: str) -> Any:
    """Return the strategy ``name``: a function, or an object of a class with its settings."""
    strategy = STRATEGIES.load(name)
    return config.evaluate.build_named(name) if isinstance(strategy, type) else strategy


def measurements(
    config: Config, quick: bool, report: Callable[[str], None], further: Sequence[FurtherWeights] = ()
) -> list[Measurement]:
    """Find every model and read every set. Raises ConfigError for what cannot be used; ``report`` takes a line.

    ``further``: weights that the model :data:`START` is measured with as well.
    """
    measurements: list[Measurement] = []
    warned = set[str]()  # sets, of the first model that is trained to chat
    for name, path in config.models.items():
        model = _model(config, name, path)
        sets = [
            _questions(config, model, name_of_set, settings, quick)
            for name_of_set, settings in config.evaluate.sets.items()
        ]
        end = turn_end([question.prompt for questions in sets for question in questions.questions], model.tokenizer)
        model = replace(model, info=with_turn_end(model.info, end))
        for questions in sets:
            if questions.n_too_long:
                report(f"{questions.name}: {questions.n_too_long} questions are too long for {name} and are left out")
            own_prompts = {"files": [question.prompt for question in questions.questions]}
            if questions.section not in warned and warn_of_raw_text(
                f"models.{name}={path}", model.tokenizer, questions.settings, questions.section, own_prompts
            ):
                warned.add(questions.section)
        became = [replace(model, name=w.name, fingerprint=w.fingerprint, weights=w) for w in further if name == START]
        for variant in (model, *became):
            for questions in sets:
                measurements += _plan_strategies(config, variant, questions)
    for name, endpoint in config.evaluate.endpoints.items():
        for set_name, settings in config.evaluate.sets.items():
            stand_in = Bytes(settings.chat_template_kwargs)
            questions = load_questions(set_name, settings, stand_in, LONGEST, QUICK if quick else None)
            measurements += _plan_strategies(config, EndpointModel(name, endpoint), questions)
    left_out = [f"{m.questions.name}: {line}" for m in measurements for line in m.questions.describe_unanswered()]
    for line in dict.fromkeys(left_out):  # most are of every model
        report(line)
    _require_files_of_their_own(measurements)
    return measurements


def _require_files_of_their_own(measurements: Sequence[Measurement]) -> None:
    """Raise ConfigError where the results of two measurements would have one file, as of m_a on b and of m on a_b."""
    by_file: dict[str, Measurement] = {}
    for measurement in measurements:
        questions = measurement.questions
        file = name_file(measurement.model.name, measurement.label, questions.name, len(questions.questions))
        other = by_file.setdefault(file, measurement)
        if other is not measurement:
            raise ConfigError(
                f"evaluate.sets.{questions.name}: the results of {measurement.model.name} on it and of "
                f"{other.model.name} on {other.questions.name} would both be results/{file}: rename a set or a model"
            )


def _plan_strategies(config: Config, model: LocalModel | EndpointModel, questions: Questions) -> list[Measurement]:
    reward_settings(config, questions)
    sampling = sampling_of(config.rollout, questions.settings)
    computed_by = describe_engine(config) if isinstance(model, LocalModel) else ""
    return [
        Measurement(model, questions, strategy, sampling, _identity(config, strategy), computed_by)
        for strategy in _strategies(config)
    ]


def describe_engine(config: Config) -> str:
    """Return the settings of what computes answers, without those that have their default."""
    engine_settings = {"rollout.engine": (config.rollout, "engine"), "model.dtype": (config.model, "dtype")}
    return " ".join(
        f"{setting}={value}"
        for setting, (section, name) in engine_settings.items()
        if (value := getattr(section, name)) != type(section).model_fields[name].default
    )


def _strategies(config: Config) -> Sequence[str]:
    names = config.evaluate.strategies
    if len({shorten_name(name) for name in names}) < len(names):
        raise ConfigError(f"evaluate.strategies={names}: two of them end in the same name; rename one")
    return names


def _model(config: Config, name: str, path: str) -> LocalModel:
    setting = f"models.{name}"
    directory = check_causal_lm(path, setting)
    if config.rollout.engine_class.needs_vllm:
        require_vllm_runs(directory, setting, STUDENT_REMEDY)
    tokenizer = load_tokenizer(directory, setting)
    return LocalModel(name, directory, fingerprint(directory), tokenizer, ModelInfo.read(directory, setting, tokenizer))


def _questions(config: Config, model: LocalModel, name: str, settings: EvalSet, quick: bool) -> Questions:
    response, longest = sampling_of(config.rollout, settings).max_tokens, config.data.max_prompt_length
    if model.info.positions is not None:
        longest = min(longest, model.info.positions - response)
    if longest < 1:
        raise ConfigError(
            f"evaluate.sets.{name}: answers of {response} tokens leave no room for a question: models.{model.name} has "
            f"{model.info.positions} positions (max_response_length)"
        )
    return load_questions(name, settings, model.tokenizer, longest, QUICK if quick else None)
