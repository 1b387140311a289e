"""Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from gkd.config.base import Settings
from gkd.config.loading import dump_public
from gkd.errors import ConfigError, describe_error
from gkd.observability.trackers.tracker import FINISH_S, TrackedRun, Tracker, keep_id, sample_table

STEP = "trainer/step"


class WandB(Tracker):
    """Sends metrics to a run of a project; its id is kept in the output directory for a resumed one."""

    class Config(Settings):
        """Place of the run among others."""

        project: str = Field("gkd", min_length=1, description="project of the run at wandb (verl's project_name)")

    package: ClassVar[str | None] = "wandb"

    @classmethod
    def require_login(cls) -> None:
        """Raise ConfigError without a key, unless wandb is offline."""
        import wandb

        wandb.setup(wandb.Settings(silent=True))
        try:
            wandb.login()
        except Exception as error:
            raise _refusal(error) from None
        finally:
            wandb.teardown()

    def __init__(self, config: Config, run: TrackedRun) -> None:
        import wandb

        self._end = wandb.teardown
        id, _ = keep_id(run, "wandb_id", lambda: uuid.uuid4().hex)
        try:
            self._run: Any = wandb.init(
                project=config.project,
                name=run.name,
                group=run.config.trainer.run_group,
                id=id,
                resume="allow",
                dir=str(run.output_dir),
                config=dump_public(run.config),
                settings=wandb.Settings(silent=True, console="off", finish_timeout=FINISH_S),
            )
        except Exception as error:  # no key, no network, no such project: wandb has many names for it
            self._end()
            raise _refusal(error) from None

        # An axis of the run's own: wandb's counts calls, and forgets what a resumed run does again.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._run.log({STEP: step, **metrics})

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Send samples as a table."""
        import wandb

        columns, rows = sample_table(samples)
        # Columns that have numbers here and none there are one type to wandb as texts alone.
        data = [[value if isinstance(value, int | float) else str(value) for value in row] for row in rows]
        self._run.log({STEP: step, "samples": wandb.Table(columns=columns, data=data, allow_mixed_types=True)})

    def close(self, failed: bool) -> None:
        """Send what is left, and end wandb's process."""
        try:
            self._run.finish(exit_code=int(failed))
        finally:
            self._end()


def _refusal(error: Exception) -> ConfigError:
    return ConfigError(
        f"trainer.trackers: wandb did not start: {describe_error(error)} "
        "(WANDB_MODE=offline needs neither a key nor a network)"
    )
