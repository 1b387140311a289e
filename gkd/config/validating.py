"""When a run validates, and what it does with a figure of validation: keep the best student, end early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field, model_validator

from gkd.config.base import Settings
from gkd.config.open import find_changed_settings
from gkd.errors import ConfigError

FALLING = ("loss", "reverse_kl", "length", "truncated", "failed")
"""Last parts of figures that are better the smaller they are."""
FIGURE = r"^val/.+"


def is_better(metric: str, value: float, than: float, by: float = 0.0) -> bool:
    """Return whether a figure of validation is better than an earlier one, by more than ``by``."""
    *above, last = metric.split("/")
    falls = last in FALLING and above[-1:] != ["reward"]  # a reward may have one of these names
    return (than - value if falls else value - than) > by


class StopEarly(Settings):
    """Ends a run whose validation does not get better."""

    metric: str | None = Field(
        None,
        pattern=FIGURE,
        description="figure of validation, as trainer.keep_best, without whose improvement the run ends; null: never",
    )
    patience: int = Field(
        3, ge=1, description="validations in a row without improvement that end the run (TRL: early_stopping_patience)"
    )
    min_delta: float = Field(
        0.0, ge=0, description="what counts as improvement is more than this (TRL: early_stopping_threshold)"
    )

    @model_validator(mode="after")
    def _something_is_looked_at(self) -> StopEarly:
        for name, value in find_changed_settings(self).items() if self.metric is None else ():
            raise ValueError(f"{name}={value} is for a figure of validation: name it (metric=val/accuracy)")
        return self

    def reason(self, measured: Sequence[tuple[int, float]]) -> str | None:
        """Return why a run is to end whose figure was ``measured`` at these steps, in one line; None where it goes on.

        The first measurement is that before training.
        """
        if self.metric is None or not measured:
            return None
        (at, best), since = measured[0], 0
        for step, value in measured[1:]:
            if is_better(self.metric, value, best, self.min_delta):
                at, best, since = step, value, 0
            else:
                since += 1
        if since < self.patience:
            return None
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return (
            f"{self.metric} has not got better than {best:.4f} of step {at}{by} in {since} validations "
            f"(trainer.stop_early.patience={self.patience})"
        )


class ValidationSettings(Settings):
    """The part of the section ``trainer`` about validation."""

    val_every: int = Field(
        50, ge=1, description="validate every so many steps (verl's test_freq), also before the first and at the end"
    )
    keep_best: str | None = Field(
        None,
        pattern=FIGURE,
        description="figure of validation, such as val/accuracy or val/NAME/accuracy of data.val_sets: the student "
        "that is best by it, of those that were trained, is kept in best/ (TRL's metric_for_best_model)",
    )
    stop_early: StopEarly = StopEarly()


def require_figures(trainer: ValidationSettings, measured: Mapping[str, float], groups: Sequence[str] = ()) -> None:
    """Raise ConfigError, naming the setting, where a validation has no such figure, and rewards that all failed.

    Any figure ``val/GROUP/...`` of ``groups`` may be measured.
    """
    settings = {"trainer.keep_best": trainer.keep_best, "trainer.stop_early.metric": trainer.stop_early.metric}
    failed = [name for name, share in measured.items() if name.endswith("/failed") and share == 1.0]
    why = f"; no answer got a reward: {', '.join(failed)}" if failed else ""
    for setting, metric in settings.items():
        if metric is not None and metric not in measured and metric.split("/")[1] not in groups:
            names = [*measured, *(f"val/{group}/*" for group in groups)]
            raise ConfigError(f"{setting}={metric}: validation measures {', '.join(names) or 'nothing'}{why}")
