"""Timings of an earlier run in place of assumptions: its measured stages against the plan of its own layout."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, fmean, mean, median
from typing import Any

from gkd.cluster.gpu import are_simulated
from gkd.config import Config
from gkd.config.base import SCORERS
from gkd.config.loading import read_run
from gkd.config.output_files import CONFIG, METRICS, PLACEMENT, SAMPLES, parse, read_whole_lines
from gkd.errors import ConfigError
from gkd.planning.layout import Layout, models_of
from gkd.planning.measured.busy import busy_by_step, busy_seconds, paces_of
from gkd.planning.measured.driver import driver_times
from gkd.planning.measured.timeline import RunTimeline, find_disturbed_steps
from gkd.planning.simulation.run import Step
from gkd.planning.simulation.stages import Factors, device_shares, stages_of
from gkd.planning.simulation.steps import run_of, simulate_layout

MOST_SPREAD = 3.0
CALIBRATIONS = 6
SAMPLES_READ, FEWEST_SAMPLES = 2 << 20, 64  # bytes of samples.jsonl, and samples that state how lengths are distributed
SCORING_LED = 0.2  # beyond this share of sampling, what scoring took after it states how long scoring takes in all


def factors_of(directory: str, layout: Layout) -> Factors:
    """Compare what a run measured with its plan on the hardware of ``layout``.

    Read are its config.yaml and metrics.jsonl, and what workers and the driver did in timeline.json, where it has one.

    Raises ConfigError for a directory that holds no run, or one on other devices.
    """
    path = Path(directory)
    _require_same_device(path, layout)
    config, rows = read_run(path / CONFIG), _read_rows(path)
    lengths = Factors(
        prompt=_mean_prompt(config, rows),
        response=_mean(rows, "response/length_mean"),
        spread=_spread(config, rows),
        measured_lengths=_read_logged_lengths(path),
    )
    config = lengths.lengths(config)
    try:
        ran = replace(layout, config=config, models=models_of(config))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    timeline = RunTimeline.read(path)
    by_step = busy_by_step(timeline, ran.hosts, ran.groups_at_once, device_shares(ran))
    busy = busy_seconds(by_step)
    simulated = simulate_layout(ran, config.schedule.max_staleness)
    sync = _ratio(fmean(row.get("timing_s/sync", 0.0) for row in rows), stages_of(ran).sync)
    factors = replace(lengths, sync=sync, driver=driver_times(timeline), staleness=config.schedule.max_staleness)
    if set(simulated.busy) <= set(busy):
        paces = () if config.schedule.in_flight else paces_of(by_step)  # in flight, a step has no samples of its own
        return replace(_fit_busy(busy, ran, factors), paces=paces)
    generate, score, update = _fit_timings(rows, ran, simulated)
    return replace(factors, generate=generate, score=score, update=update)


def _fit_busy(busy: Mapping[str, float], ran: Layout, factors: Factors) -> Factors:
    """Return the factors with which the simulation has each group as busy in a step as it was."""
    planned, staleness = stages_of(ran), ran.config.schedule.max_staleness
    spared_s = run_of(ran, staleness, factors).spared_s
    factors = replace(factors, update=_ratio(busy["actor"], planned.update))
    for _ in range(CALIBRATIONS):  # how many samples are computed together depends on how long they take
        simulated = simulate_layout(ran, staleness, factors)
        scorers = [group for group in SCORERS if group in simulated.busy]
        sampling = simulated.busy["rollout"] - (factors.apply(planned).sync - spared_s)
        scoring = sum(simulated.busy[group] for group in scorers)
        factors = replace(
            factors,
            generate=factors.generate * _ratio(busy["rollout"], sampling),
            score=factors.score * _ratio(sum(busy[group] for group in scorers), scoring),
        )
    return factors


def _fit_timings(rows: list[dict[str, Any]], ran: Layout, simulated: Step) -> tuple[float, float, float]:
    """Return the factors of sampling, scoring and updates by the driver's times.

    These have waits in them where stages overlap, as with streaming or samples that are ahead.
    """
    planned = stages_of(ran)
    stages = ("generate", "score", "update")
    seconds = {name: median(row.get(f"timing_s/{name}", 0.0) for row in rows) for name in stages}
    generate, score = _ratio(seconds["generate"], simulated.generate), 1.0
    scoring = max(planned.score, planned.reference, planned.reward)
    if scoring and seconds["score"] > SCORING_LED * seconds["generate"]:
        score = (seconds["generate"] + seconds["score"]) / (scoring + planned.tail)
    device_of = {group: ran.hosts.get(group, group) for group in ("rollout", *SCORERS)}
    if scoring and device_of["rollout"] in [device_of[group] for group in SCORERS]:
        # Each is slower while the other works, so what was measured is the time of both together.
        generate = score = _ratio(seconds["generate"] + seconds["score"], simulated.scored)
    return generate, score, _ratio(seconds["update"], planned.update)


def _ratio(measured: float, planned: float) -> float:
    """Return the factor of a stage; 1 of one that the run does not have, as sampling in supervised training."""
    return measured / planned if planned else 1.0


def _require_same_device(path: Path, layout: Layout) -> None:
    """Raise ConfigError where the run computed on CPUs and the plan is of GPUs, or the other way round."""
    try:
        workers = parse((path / PLACEMENT).read_bytes())
        on_cpu = are_simulated(uuid for row in workers for uuid in row["gpu_uuids"])
    except OSError:
        return  # the files that are needed state what is missing
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: placement.json cannot be read: {error}") from None
    if on_cpu != layout.hardware.is_cpu:
        ran, planned = ("CPUs", "GPUs (plan.gpu_type)") if on_cpu else ("GPUs", "CPUs")
        raise ConfigError(f"{path}: that run computed on {ran}, and this plan is of {planned}")


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of every step with timings but the first, which warms up, and those in which workers ended."""
    rows = [row for row in read_whole_lines(path / METRICS) if "timing_s/update" in row]
    if not rows:
        raise ConfigError(f"{path}: metrics.jsonl has no step with timings yet")
    if odd := [name for row in rows for name, value in row.items() if not isinstance(value, int | float)]:
        raise ConfigError(f"{path}: metrics.jsonl has a {odd[0]} that is no number")
    rows, disturbed = rows[1:] or rows, find_disturbed_steps(path)
    return [row for row in rows if row.get("step") not in disturbed] or rows


def _mean(rows: list[dict[str, Any]], name: str) -> int | None:
    values = [row[name] for row in rows if name in row]
    return max(1, round(mean(values))) if values else None


def _mean_prompt(config: Config, rows: list[dict[str, Any]]) -> int | None:
    """Return the mean tokens of a prompt: all of a step's tokens, without the responses'."""
    n, groups = config.rollout.n, config.trainer.batch_size  # of dynamic sampling as many as were drawn
    needed = ("perf/tokens_per_second", "timing_s/step", "response/length_mean")
    lengths = [
        row["perf/tokens_per_second"] * row["timing_s/step"] / (row.get("reward/groups", groups) * n)
        - row["response/length_mean"]
        for row in rows
        if all(name in row for name in needed)
    ]
    return max(1, round(mean(lengths))) if lengths else None


def _read_logged_lengths(path: Path) -> tuple[int, ...]:
    """Return the tokens of the newest logged responses; none where they are few, or the run logged none.

    Raises ConfigError for a file that cannot be read.
    """
    samples = path / SAMPLES
    try:
        with samples.open("rb") as file:
            skipped = max(0, file.seek(0, os.SEEK_END) - SAMPLES_READ)
            file.seek(skipped)
            *lines, _ = file.read().split(b"\n")  # the last one may be torn, and the first one where some was skipped
        lengths = [int(parse(line)["length"]) for line in (lines[1:] if skipped else lines)]
    except FileNotFoundError:  # a run without them is planned all the same
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{samples} cannot be read: {error}") from None
    return tuple(sorted(lengths)) if len(lengths) >= FEWEST_SAMPLES else ()


def _spread(config: Config, rows: list[dict[str, Any]]) -> float | None:
    """Return the spread of a lognormal distribution whose longest of a batch, or share at the limit, is the run's.

    The longest of N lies at the quantile 1 - 1 / 2 N, and at exp(z s - s^2 / 2) times the mean, for z of that quantile.
    """
    samples = config.trainer.batch_size * config.rollout.n
    spreads = []
    for row in rows:
        if row.get("response/length_mean", 0) > 0 and "response/length_max" in row:
            z = NormalDist().inv_cdf(1 - min(0.5, max(0.5 / samples, row.get("response/clip_ratio", 0.0))))
            ratio = row["response/length_max"] / row["response/length_mean"]
            spreads.append(z - math.sqrt(max(0.0, z * z - 2 * math.log(max(1.0, ratio)))))
    return min(MOST_SPREAD, mean(spreads)) if spreads else None
