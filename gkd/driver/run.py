"""One run inside a connected Ray: place, start, validate, train, save, report."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from gkd.cluster.health.queues import QueueFile
from gkd.cluster.layout.assignment import placement_table
from gkd.cluster.session.connect import Session
from gkd.cluster.workers.heap import freeze_heap_meanwhile
from gkd.cluster.workers.placement import Placement, lay_out, place
from gkd.config import Config
from gkd.config.checks import require_schedule
from gkd.config.doubts import doubts
from gkd.config.idle import find_idle
from gkd.config.loading import dump_run
from gkd.config.output_files import CONFIG, ENGINES, EVENTS, METRICS, PLACEMENT, SAMPLES, SOURCES, SUMMARY, TIMELINE
from gkd.config.overrides import shell_override
from gkd.config.own_code import keep_sources
from gkd.config.validating import require_figures
from gkd.data.layouts import get_stated_day
from gkd.driver.checkpoints.attempts import restarts
from gkd.driver.checkpoints.checkpoint import RunState, SavedCheckpoint
from gkd.driver.checkpoints.resume import DAY, cut, differences, forget_best_after, require_same_data
from gkd.driver.checkpoints.saving import Checkpoints, require_place
from gkd.driver.inputs.find import Inputs
from gkd.driver.inputs.models import with_scoring_engines
from gkd.driver.loop.parts import Parts, RunLog
from gkd.driver.loop.train import train
from gkd.driver.startup import start, with_transfer
from gkd.driver.validation.best import BestModel
from gkd.driver.validation.early_stop import EarlyStop
from gkd.driver.validation.final_scores import SetScores, write_scores
from gkd.durable import DirectoryIdentity, replace
from gkd.errors import ConfigError, RunFailed
from gkd.observability import report
from gkd.observability.events import Events, note
from gkd.observability.metrics import JsonLines, keep_finite
from gkd.observability.page.write import write_at_end
from gkd.observability.progress import Progress, changes, print_table
from gkd.observability.samples import SampleLog
from gkd.observability.timeline import Timeline
from gkd.observability.tracking import MetricsLog, OnStep, Trackers
from gkd.planning.advice.advise import plan_sizes, require_memory, requires_offload, settings_with_offload
from gkd.planning.advice.splits import find_faster_split
from gkd.planning.layout import models_of
from gkd.scoring.client import ScoringClient
from gkd.version import __version__

log = logging.getLogger("gkd")
CPU_SPLIT = "on a CPU all groups share its cores, however GPUs are split"


def drive(
    config: Config,
    inputs: Inputs,
    session: Session,
    directory: DirectoryIdentity,
    out: Console,
    started_s: float,
    saved: SavedCheckpoint | None,
    on_step: OnStep | None,
) -> None:
    """Do everything between connecting to Ray and leaving it; ``started_s`` (``time.monotonic``): when the run began.

    ``directory`` is the one that it claimed, ``saved`` the checkpoint that it goes on from.
    """
    output = directory.path
    try:
        with keep_sources(output / SOURCES), Events(output / EVENTS, _find_first_step(saved), started_s) as events:
            if saved is None:
                note("start", f"gkd {__version__}, recipe {config.recipe}")
            else:
                text = "; ".join(filter(None, (f"from {saved.path}", differences(saved, config))))
                note("resume", text, step=saved.state.step)
            if n_restarts := restarts():
                note("restart", f"{n_restarts} of trainer.restarts={config.trainer.restarts}")
            summary, checkpoints, best = _drive(
                config, inputs, session, directory, out, started_s, saved, events, on_step
            )
    finally:
        page = write_at_end(output)
    report.show(summary, output, page, _make_next_command(config, output), out)
    checkpoints.finish()
    if best is not None:
        best.finish()


def _drive(
    config: Config,
    inputs: Inputs,
    session: Session,
    directory: DirectoryIdentity,
    out: Console,
    started_s: float,
    saved: SavedCheckpoint | None,
    events: Events,
    on_step: OnStep | None,
) -> tuple[report.Summary, Checkpoints, BestModel | None]:
    """Do the run; returns what it came to, its checkpoints, of which the last may have failed, and its best student."""
    output, requested, config = directory.path, config, lay_out(with_scoring_engines(config, inputs.scorers))
    _write(requested, config, output)
    placement = _place_and_show(config, session, output, out)
    config = with_transfer(_with_offload(config, placement), placement.groups)
    _write(requested, config, output)  # once more, with what the placement decided
    out.print(step_text(config, inputs.max_length), soft_wrap=True)
    _log_doubts(requested, config, placement)
    with (
        Progress(out, config.trainer.total_steps) as progress,
        Trackers(config, output, _find_first_step(saved), saved is None and not restarts()) as trackers,
    ):
        progress.show_status("loading models")
        parts = start(config, inputs, placement)
        teachers = parts.validation.teachers
        parts.rollout.queue_file = QueueFile(output / ENGINES)
        external = config.algorithm.needs_teacher and config.teacher.server_ip is not None
        fingerprints = {**inputs.fingerprints(config), DAY: get_stated_day().isoformat()}
        if external:
            fingerprints |= _fingerprint_served(teachers["teacher"], saved)
        require_place(directory)  # models took minutes to load
        first = 0 if saved is None else _forget_after(saved, output)
        with MetricsLog(output / METRICS, trackers, events, on_step) as metrics, JsonLines(output / SAMPLES) as sampled:
            samples = SampleLog(sampled, config, inputs.tokenizer, trackers)
            checkpoints = Checkpoints(requested, directory, started_s, fingerprints, first, (metrics, sampled))
            best = None if config.trainer.keep_best is None else BestModel(config.trainer.keep_best, directory)
            scorer = "teacher" if external else "rewards"
            timeline = Timeline(output / TIMELINE, config.trainer.n_timeline_steps, first, scorer)
            stop = EarlyStop(config.trainer.stop_early, output / METRICS)
            run_log = RunLog(metrics, samples, progress, checkpoints, timeline, best, stop)
            n_val = sum(prompt.answer is not None for prompt in inputs.val.prompts)
            try:
                summary = _train_and_save(config, parts, run_log, saved, output, n_val)
                events.finish(summary.steps)
            finally:
                timeline.write()
            on_gpus = placement.groups["actor"].reports[0].device == "cuda"
            _print_pace(config, output, run_log, requested, on_gpus)
            if stop.reason is not None and summary.steps < config.trainer.total_steps:
                progress.print_line(f"stopped early after step {summary.steps}: {stop.reason}")
                note("stop", stop.reason, step=summary.steps)
        for client in teachers.values():
            client.close()
    return summary, checkpoints, best


def _fingerprint_served(client: ScoringClient, saved: SavedCheckpoint | None) -> dict[str, str]:
    """Return what a served teacher is known by, and have it noted where it goes and comes back.

    Raises ConfigError where the checkpoint was made with another one.
    """
    client.on_change = _note_server
    served = {"teacher.server_ip": client.weights}
    if saved is not None:
        require_same_data(saved, served)
    return served


def _note_server(text: str, is_back: bool) -> None:
    log.log(logging.INFO if is_back else logging.WARNING, text, extra={"kind": "restart" if is_back else "death"})


def _forget_after(saved: SavedCheckpoint, output: Path) -> int:
    """Forget what the run's files state of steps after a checkpoint, and of its end; returns the checkpoint's step."""
    cut(output / METRICS, saved.state.last_logged_step)
    cut(output / SAMPLES, saved.state.step)
    forget_best_after(output, saved.state.last_logged_step)
    for file in (output / SUMMARY, *output.glob("results/*.json")):
        file.unlink(missing_ok=True)  # of an end that is not the end any more
    return saved.state.step


def _print_pace(config: Config, output: Path, log: RunLog, requested: Config, on_gpus: bool) -> None:
    """Print in one line where the time went, and which split of the GPUs would be faster, if steps were timed.

    ``requested``: the configuration as it was requested.
    """
    if pace := log.timeline.summary():
        split = find_faster_split(config, output, requested) if on_gpus else CPU_SPLIT
        log.progress.print_line("; ".join(filter(None, (pace, split))))


def _write(requested: Config, config: Config, output: Path) -> None:
    replace(output / CONFIG, f"# gkd {__version__}\n{dump_run(requested, config)}".encode())


def _find_first_step(saved: SavedCheckpoint | None) -> int:
    return 0 if saved is None else saved.state.last_logged_step + 1


def _train_and_save(
    config: Config, parts: Parts, log: RunLog, saved: SavedCheckpoint | None, output: Path, n_val: int
) -> report.Summary:
    """Train, from a checkpoint where there is one, and write the student and what the run came to.

    With that the run is finished; where it ends before, a checkpoint is saved. ``n_val``: as of the summary.
    """
    state = _validate_before(config, parts, log) if saved is None else _restore(config, parts, log, saved)
    try:
        with freeze_heap_meanwhile():
            end = train(config, parts, log, state)
        place = log.checkpoints.settle()
        parts.actor.save(str(place / "model"))
        log.checkpoints.wait()
        if place != output:
            raise RunFailed(f"{output} is not there any more: the trained student is in {place / 'model'}")
        log.metrics.require_written()
        write_scores([SetScores("val", 1, parts.validation.scores), *parts.val_sets.last_scores.values()], output)
        wall_s = state.wall_s + time.monotonic() - log.checkpoints.started
        summary = report.Summary(state.before, end.validated, state.teacher, end.step, wall_s, n_val)
        report.write(summary, output)
        return summary
    except BaseException:
        log.checkpoints.rescue(parts.actor)
        raise


def step_text(config: Config, max_length: int) -> str:
    """Describe what one step is made of, and the settings that memory depends on, in one line.

    ``max_length``: tokens that a prompt and its response may have together, of models with few positions below the sum
    of the settings.
    """
    actor, prompts, n = config.actor, config.trainer.batch_size, config.rollout.n
    response = config.rollout.max_response_length
    samples = prompts * n
    sampled = f"{n} = {samples:,} sample{'s' * (samples != 1)}"
    learned_from = "their own answers" if config.algorithm.is_supervised else sampled
    updates = actor.epochs * -(-samples // (actor.mini_batch_size or samples))
    parts = [
        f"a step: {prompts:,} prompt{'s' * (prompts != 1)} x {learned_from}, {updates} update{'s' * (updates != 1)}",
        f"prompts up to {max_length - response:,} and responses up to {response:,} tokens",
        f"micro-batches of {actor.micro_batch_tokens:,} tokens",
        f"learning rate {actor.lr:g}",
    ]
    if actor.gradient_checkpointing:
        parts.append("gradient checkpointing")
    if actor.lora.r is not None:
        parts.append(f"LoRA r={actor.lora.r}" + (f" over {actor.lora.quantize}" if actor.lora.quantize else ""))
    if actor.offloaded is not None:
        parts.append(f"{'weights and ' * actor.offload_weights}optimizer in the host's memory")
    return "; ".join(parts)


def _log_doubts(requested: Config, config: Config, placement: Placement) -> None:
    """Log what was decided about importance weights, and warn of settings that change nothing or cannot work."""
    device = placement.groups["actor"].reports[0].device
    decided = config.algorithm_on(device).importance_sampling.level
    if config.algorithm.importance_sampling.level == "auto" and decided is not None:
        staleness = config.schedule.max_staleness
        why = (
            f"samples may be of weights up to {staleness} updates behind (schedule.max_staleness)"
            if staleness
            else "engine and trainer can differ in how they compute"
        )
        log.info("%s: importance weights by %s correct for it (algorithm.importance_sampling.level=auto)", why, decided)
    for doubt in (*find_idle(requested), *doubts(config)):
        log.warning(doubt)


def _validate_before(config: Config, parts: Parts, log: RunLog) -> RunState:
    """Validate the student as it comes."""
    log.progress.show_status("validating")
    before, teacher = keep_finite(parts.validation.run()), keep_finite(parts.validation.teacher())
    before |= keep_finite(parts.val_sets.run(parts.val_sets.select_due_sets(0)))
    require_figures(config.trainer, before)
    log.stop.update(0, before)
    log.metrics.write({"step": 0, "epoch": parts.prompts.epoch, **before})
    log.progress.validated = before
    log.progress.print_line(
        f"before training  {changes(before)}" + (f"   teacher  {changes(teacher)}" if teacher else "")
    )
    return RunState(before=before, teacher=teacher)


def _restore(config: Config, parts: Parts, log: RunLog, saved: SavedCheckpoint) -> RunState:
    """Have the actor, the engines and the order of prompts go on from a checkpoint."""
    log.progress.show_status(f"reading {saved.path}")
    parts.actor.load_state([str(file) for file in saved.rank_files], saved.state.step)
    parts.prompts.restore(saved.state.prompts)
    parts.sync.push()
    log.progress.print_line(f"going on after step {saved.state.step} from {saved.path}")
    state = saved.state
    if state.row is None and (state.step == config.trainer.total_steps or log.stops_early):
        # No step is left whose end would validate, and the scores of the validation before it went with its process.
        log.progress.show_status("validating")
        scores = keep_finite(parts.validation.run()) | keep_finite(parts.val_sets.run(parts.val_sets.sets))
        state = dataclasses.replace(state, validated={**state.validated, **scores})
    log.progress.validated = {**state.before, **state.validated}
    return state


def _place_and_show(config: Config, session: Session, output: Path, out: Console) -> Placement:
    """Place the groups; the table is shown and placement.json written also when the check fails."""

    def show(placement: Placement, is_right: bool) -> None:
        print_table(out, placement_table(placement.reports, narrow=is_right))
        placement.write_json(output / PLACEMENT)

    return place(config, session, nodes_come=restarts() > 0, show=show)


def _with_offload(config: Config, placement: Placement) -> Config:
    """Return ``config`` with cluster.offload and the sizes that are planned decided.

    Raises ConfigError, with the plan's advice, for a layout that cannot fit, before anything loads.
    """
    offload, sizes = _check_memory(config, placement)
    slots, cache_gb = sizes["rollout.max_num_seqs"], sizes["rollout.kv_cache_gb"]
    if offload:
        engines = ", ".join(config.groups_on_actor_gpus())
        log.info(
            "colocated: the actor is offloaded while %s work, which sleep while it does (cluster.offload=%s)",
            engines,
            config.cluster.offload,
        )
    if config.rollout.max_num_seqs is None and slots != config.rollout.slots:
        log.info("each rollout engine samples up to %d sequences at a time (rollout.max_num_seqs=null)", slots)
    if config.rollout.kv_cache_gb is None and cache_gb is not None:
        log.info(
            "each rollout engine's cache takes %d GiB, twice what it can fill (rollout.kv_cache_gb=null)", cache_gb
        )
    requested = config.schedule.max_staleness
    config = config.with_settings(settings_with_offload(config, offload) | sizes)
    if config.schedule.max_staleness != requested:
        log.warning(
            "schedule.max_staleness=%d is 0 here: the GPUs that actor and engines share do not hold both, so nothing "
            "is sampled while the actor learns; GPUs of their own (%s), or less memory (gkd plan), would change that",
            requested,
            config.own_gpus(),
        )
    try:
        require_schedule(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


def _check_memory(config: Config, placement: Placement) -> tuple[bool, dict[str, Any]]:
    """Raise ConfigError for a layout that cannot fit.

    Returns whether colocated groups are offloaded, and the settings of engines and actor that are planned.
    """
    offload = config.cluster.offload is True
    unplanned = {
        "rollout.max_num_seqs": config.rollout.slots,
        "rollout.kv_cache_gb": config.rollout.kv_cache_gb,
        "actor.max_tokens_per_micro_batch": config.actor.micro_batch_tokens,
    }
    reports = placement.reports
    sizes = {
        group: min(memory)
        for group in placement.groups
        if (memory := [r.gpu_bytes for r in reports if r.group == group and r.gpu_bytes is not None])
    }
    if not sizes and len({report.node_id for report in reports}) > 1:
        return offload, unplanned  # whose memory groups on CPUs have depends on which of them are on one machine
    try:
        models = models_of(config)
    except ConfigError as error:
        log.info("whether the layout fits into memory is not known: %s", error)
        return offload, unplanned
    nodes = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    require_memory(config, models, sizes or None, [n for n in nodes if n])
    offload = offload or requires_offload(config, models, sizes or None)
    decided = config.with_settings(settings_with_offload(config, offload))
    return offload, plan_sizes(decided, models, sizes or None)


def _make_next_command(config: Config, output: Path) -> str:
    """Return what a user would try after this run: own data after the built-in task, the trained student after that."""
    if not config.uses_task:
        return f"go on from here: the same command with {shell_override('model.path', output / 'model')}"
    teacher = "teacher.model.path=DIR " if config.algorithm.needs_teacher else ""
    return (
        f"your own models and data: python -m gkd.main +recipe={config.recipe} model.path=DIR {teacher}"
        "data.train_files=[train.jsonl] data.val_files=[test.jsonl] data.prompt_key=question data.answer_key=answer"
    )
