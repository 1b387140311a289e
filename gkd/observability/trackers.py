"""Metrics to TensorBoard and Weights & Biases, beside metrics.jsonl, which is always written.

Both packages are extras and imported only where they are asked for.
"""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from gkd.cluster.shutdown import within
from gkd.config import Config
from gkd.errors import ConfigError
from gkd.observability.metrics import JsonLines

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
FINISH_S = 300.0
"""Time that what is left has to reach wandb when a run ends; its files stay in the output directory."""


class Tracker(Protocol):
    """Where metrics go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step."""

    def close(self, failed: bool) -> None:
        """Write what is left; ``failed``: the run did not come to its end."""


class TensorBoard:
    """Event files in ``output_dir/tensorboard``."""

    def __init__(self, output: Path, first_step: int) -> None:
        from tensorboardX import SummaryWriter

        # A resumed run does steps again whose first metrics are there already.
        self._writer = SummaryWriter(str(output / "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """Write what is left."""
        self._writer.close()


class WandB:
    """A run of the project ``trainer.project``; its id is kept in the output directory for a resumed one."""

    def __init__(self, config: Config, output: Path) -> None:
        import wandb

        self._end = wandb.teardown
        kept = output / "wandb_id"
        if not kept.exists():
            kept.write_text(uuid.uuid4().hex)
        try:
            self._run: Any = wandb.init(
                project=config.trainer.project,
                name=output.name,
                id=kept.read_text(),
                resume="allow",
                dir=str(output),
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(silent=True, console="off", finish_timeout=FINISH_S),
            )
        except Exception as error:  # no key, no network, no such project: wandb has many names for it
            self._end()
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"trainer.trackers: wandb did not start: {type(error).__name__}: {reason} (WANDB_MODE=offline needs "
                "neither a key nor a network)"
            ) from None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool) -> None:
        """Send what is left, and end wandb's process."""
        try:
            self._run.finish(exit_code=int(failed))
        finally:
            self._end()


class Trackers:
    """The trackers of a run whose first new step is ``first_step``; entered, they take metrics.

    Raises ConfigError when one does not start.
    """

    def __init__(self, config: Config, output: Path, first_step: int) -> None:
        self.config, self.output, self.first_step = config, output, first_step
        self._started: list[Tracker] = []
        self._open = ExitStack()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the metrics of a step to all of them."""
        for tracker in self._started:
            tracker.log(step, metrics)

    def __enter__(self) -> Self:
        with ExitStack() as started:  # which closes the first where the next one fails
            for name in self.config.trainer.trackers:
                tracker = self._start(name)
                started.push(_closing(name, tracker))
                self._started.append(tracker)
            self._open = started.pop_all()
        return self

    def _start(self, name: str) -> Tracker:
        return TensorBoard(self.output, self.first_step) if name == "tensorboard" else WandB(self.config, self.output)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)


def _closing(name: str, tracker: Tracker) -> Callable[..., None]:
    """What closes a tracker when the run leaves it, in bounded time."""

    def close(kind: type[BaseException] | None, *_: object) -> None:
        within(FINISH_S + 60, f"closing {name}", lambda: tracker.close(failed=kind is not None))

    return close


class MetricsLog(JsonLines):
    """metrics.jsonl, and trackers beside it."""

    def __init__(self, path: Path, trackers: Trackers) -> None:
        super().__init__(path)
        self.trackers = trackers

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one step's metrics."""
        super().write(row)
        self.trackers.log(row["step"], {name: value for name, value in row.items() if name != "step"})


def require_trackers(config: Config) -> None:
    """Raise ConfigError unless the packages of all trackers are installed."""
    for name in config.trainer.trackers:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(f"trainer.trackers: {name} needs the package {PACKAGES[name]}: pip install 'gkd[{name}]'")
