"""Which split of its GPUs the plan would take for a run, with the timings that the run measured."""

from __future__ import annotations

from pathlib import Path

from gkd.config import Config
from gkd.errors import ConfigError
from gkd.planning.layout import Layout, gpu_hardware, models_of, with_settings
from gkd.planning.measured import factors_of
from gkd.planning.splits import best_splits
from gkd.planning.steps import simulate_layout

WORTH = 0.95  # of the present step's time, beyond which another split is not worth the words


def faster_split(config: Config, directory: Path, max_num_seqs: int | None = None) -> str:
    """Return in one line which split of a run's GPUs is faster by simulation, or that none is; or why it is not known.

    Empty where groups share GPUs. ``directory``: what the run wrote, with ``config`` as it ran. ``max_num_seqs``: of
    the rollout section as it was asked for, which is decided anew for another split.
    """
    if config.hosts():
        return ""
    n_gpus, staleness = sum(pool.n_workers for _, pool in config.pools()), config.schedule.max_staleness
    try:
        layout = Layout(config, models_of(config), gpu_hardware(config.plan))
        factors = factors_of(str(directory), layout)
        layout = Layout(factors.lengths(config), layout.models, layout.hardware)
        now = simulate_layout(layout, staleness, factors).seconds
        asked = with_settings(layout.config, {"rollout.max_num_seqs": max_num_seqs})
        layout = Layout(asked, layout.models, layout.hardware)
        best = best_splits(layout, n_gpus, 1, staleness, factors)[0]
    except ConfigError as error:
        return f"whether another split of the GPUs would be faster is not known: {error}"
    measured = f"with what was measured, by gkd plan's simulation ({now:.2f} s a step)"
    if best.step.seconds > WORTH * now:
        return f"{measured}, no other split of {n_gpus} GPUs is much faster"
    gpus = ", ".join(f"{group} {n}" for group, n in best.gpus.items())
    return f"{measured}, {gpus} would take {best.step.seconds:.2f} s: {best.overrides()}"
