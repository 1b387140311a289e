"""MLflow."""

from __future__ import annotations

import contextlib
import logging
import re
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from pydantic import Field

from gkd.config.base import Settings
from gkd.config.loading import dump_public
from gkd.config.overrides import flatten
from gkd.observability.trackers.tracker import SpelledNames, TrackedRun, Tracker, keep_id, sample_table

TEXT = 500
"""Characters that MLflow takes of a parameter."""


class MLflow(Tracker):
    """Sends metrics to a run of an experiment; its id is kept in the output directory for a resumed one."""

    class Config(Settings):
        """Place of the run among others."""

        experiment: str = Field(
            "gkd", min_length=1, description="experiment of the run at MLflow (verl's project_name)"
        )
        tracking_uri: str | None = Field(
            None, description="MLflow's server; null: MLFLOW_TRACKING_URI, else mlflow.db in the output directory"
        )

    package: ClassVar[str | None] = "mlflow"

    def __init__(self, config: Config, run: TrackedRun) -> None:
        import os

        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it reports its tables between the lines of the run
        # Of "sqlite:///" MLflow would make a directory by the name that is quoted, besides the database.
        default_uri = f"sqlite+pysqlite:///{quote(str(run.output_dir / 'mlflow.db'))}"
        uri = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or default_uri
        files = (run.output_dir / "mlflow").as_uri() if uri == default_uri else None
        if files is not None:
            _move_artifacts(run.output_dir / "mlflow.db", config.experiment, files)
        self._client: Any = MlflowClient(tracking_uri=uri)
        self._names = SpelledNames(_as_name)

        def make_run() -> str:
            existing = self._client.get_experiment_by_name(config.experiment)
            experiment = (
                existing.experiment_id if existing else self._client.create_experiment(config.experiment, files)
            )
            return str(self._client.create_run(experiment, run_name=run.name).info.run_id)

        self._id, existed = keep_id(run, "mlflow_id", make_run)
        if existed:
            self._client.update_run(self._id, status="RUNNING", name=run.name)
        else:
            self._log_settings(run)
        if group := run.config.trainer.run_group:
            self._client.set_tag(self._id, "group", group)

    def _log_settings(self, run: TrackedRun) -> None:
        from mlflow.entities import Param

        settings = flatten(dump_public(run.config))
        names = SpelledNames(_as_name)
        params = [Param(names[name], str(value)[:TEXT]) for name, value in settings.items()]
        for first in range(0, len(params), 100):  # as many as a request may have
            self._client.log_batch(self._id, params=params[first : first + 100])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [Metric(self._names[name], value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Send samples as a table, an artifact a step."""
        columns, rows = sample_table(samples)
        data = {name: [row[i] for row in rows] for i, name in enumerate(columns)}
        self._client.log_table(self._id, data, f"samples/step_{step}.json")

    def close(self, failed: bool) -> None:
        """Record how the run ended."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def _move_artifacts(database: Path, experiment: str, files: str) -> None:
    """Have a run's own database, whose directory may have been copied or moved, state that artifacts are in ``files``.

    MLflow keeps their whole path, and offers no way to change it.
    """
    if not database.exists():
        return
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        query = "SELECT artifact_location FROM experiments WHERE name = ?"
        for (before,) in connection.execute(query, [experiment]).fetchall():
            connection.execute("UPDATE experiments SET artifact_location = ? WHERE name = ?", [files, experiment])
            moved = "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?) WHERE substr(artifact_uri, 1, ?) = ?"
            connection.execute(moved, [files, len(before) + 1, len(before), before])


def _as_name(text: str) -> str:
    """Return a name without what MLflow refuses, with which it takes nothing of a step: ``pass@4``, an empty part."""
    parts = re.sub(r"[^/\w.\- :]", "_", text).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)
