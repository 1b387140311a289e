"""``gkd plan +recipe=grpo model.path=DIR placement=8gpu [OVERRIDES]``: what a layout needs, before it runs.

Memory of each group against its GPUs, seconds of each stage and of a step, and the best split of N GPUs, from the
models' config.json alone (or ``model.size=7b``). Data need not be named. Exit codes: 0 it fits; 1 it does not; 2 it
cannot be planned.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gkd.errors import ConfigError, Parser, end_with_reader, entry_point, read_number  # nothing that may be missing

if TYPE_CHECKING:
    from gkd.config import Config
    from gkd.planning.advice.report import PlanReport
    from gkd.planning.layout import Hardware

MOST_GPUS = 65_536  # of which the best splits are found in 6 s; more would take minutes

# A plan needs no data; names stand in for those that a run would need.
STAND_INS = {"data.train_files": "[unnamed]", "data.val_files": "[unnamed]", "data.answer_key": "unnamed"}


@entry_point
def main(arguments: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    parser = Parser("gkd plan", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write everything the tables show")
    parser.add_argument(
        "--from",
        dest="run",
        metavar="RUN_DIR",
        help="take timings from an earlier run's timeline.json and metrics.jsonl",
    )
    gpus = read_number(f"a number of GPUs from 1 to {MOST_GPUS}", 1, MOST_GPUS)
    parser.add_argument("--best", type=gpus, metavar="N", help="the three best splits of N GPUs")
    parser.add_argument("--by-memory", action="store_true", help="what the actor needs changed on GPUs of other sizes")
    parser.add_argument("overrides", nargs="*", help="as for gkd train")
    options = parser.parse_intermixed_args(arguments)
    from gkd.planning.advice.report import show

    result = make(options.overrides, options.run, options.best, options.by_memory)
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(result.json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {options.json}: {error.strerror}") from None
    with end_with_reader():
        show(result)
    return 0 if all(group.fits for group in result.memory) or result.splits else 1


def make(
    overrides: Sequence[str], run: str | None = None, best: int | None = None, by_memory: bool = False
) -> PlanReport:
    """Plan what ``overrides`` configure, with the timings of an earlier ``run`` where one is named.

    Raises ConfigError for what cannot be planned.
    """
    from gkd.config.idle import find_idle
    from gkd.planning.advice.report import plan
    from gkd.planning.layout import Layout, models_of, nodes_of, require_lengths
    from gkd.planning.measured.factors import factors_of

    requested = compose_plan(overrides)
    config = _place_here(requested, best is not None)
    models = models_of(config)
    require_lengths(config, models)
    layout = Layout(config, models, _hardware(config, best is not None), nodes_of(config))
    factors = None
    if run is not None:
        try:
            factors = factors_of(run, layout)
        except ConfigError as error:
            raise ConfigError(f"--from {error}") from None
        layout = replace(layout, config=factors.lengths(config))
    return replace(plan(layout, factors, best, by_memory), idle=tuple(find_idle(requested)))


def compose_plan(overrides: Sequence[str]) -> Config:
    """Compose the configuration; data need not be named where a model of one's own is. Raises ConfigError."""
    from gkd.config.compose import compose_run, named_settings

    named = named_settings(overrides)
    if {"model.path", "model.size"} & named:
        overrides = [*(f"{key}={value}" for key, value in STAND_INS.items() if key not in named), *overrides]
    try:
        return compose_run(overrides)
    except ConfigError as error:
        if "but not teacher.model.path (or teacher.server_ip)" not in str(error):
            raise
        raise ConfigError("there is no teacher: name teacher.model.path, or teacher.model.size such as 7b") from None


def _place_here(config: Config, best: bool) -> Config:
    """Return the layout that a run would take on nodes of ``plan.nodes``, or, where this machine's GPUs are planned
    for, here.
    """
    from gkd.cluster.gpu import VISIBLE, nvml_uuids, usable_devices
    from gkd.cluster.layout.fit import share_gpus
    from gkd.cluster.layout.nodes import make_idle_nodes

    if not best and config.plan.nodes is not None:
        return share_gpus(config, make_idle_nodes(config.plan.nodes))
    if best or _names_a_gpu(config) or isinstance(config.cluster.simulate_gpus, int):
        return config
    return share_gpus(config, make_idle_nodes([len(usable_devices(os.environ.get(VISIBLE), nvml_uuids()))]))


def _names_a_gpu(config: Config) -> bool:
    """Return whether the settings describe a GPU, which is then another machine's."""
    return config.plan.gpu_type is not None or config.plan.memory_gb is not None


def _hardware(config: Config, best: bool) -> Hardware:
    """Return the CPU where the run would compute on it, else a GPU.

    That is where GPUs are simulated, by number or because there are no others, unless a GPU is planned for: with
    ``best``, ``plan.gpu_type``, or ``plan.memory_gb`` and no number of simulated ones.
    """
    from gkd.cluster.gpu import nvml_uuids
    from gkd.planning.layout import cpu_hardware, gpu_hardware

    simulated, of_gpus = config.cluster.simulate_gpus, best or config.plan.gpu_type is not None
    if not of_gpus and isinstance(simulated, int):
        return cpu_hardware(config.plan)
    if not of_gpus and simulated == "auto" and not _names_a_gpu(config) and not nvml_uuids():
        return cpu_hardware(config.plan)
    return gpu_hardware(config.plan)
