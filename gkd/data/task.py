"""What a task is: it makes the models and data of a run that names no model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gkd.config import Config
from gkd.config.data import TASKS
from gkd.errors import ConfigError, RunFailed, SignalExit, describe_raised, one_line

ReportFn = Callable[[str], None]
"""Takes progress, a line at a time."""


@dataclass(frozen=True, slots=True)
class TaskInputs:
    """Products of a task, as settings would name them: directories of the models, and files of prompts.

    ``teacher`` is None where the algorithm needs none.
    """

    student: str
    teacher: str | None
    train_files: list[str]
    val_files: list[str]


class Task(ABC):
    """Base of tasks; a user's class may derive from it, or have the same two methods.

    A class with a ``Config`` is made as ``Kind(settings, config)``, one without as ``Kind(config)``; ``config`` is the
    run's. The file of a class is imported wherever settings are checked, so torch belongs into its methods.
    """

    token_settings: ClassVar[str | None] = None
    """Which of conf/task a run is composed with that learns from a teacher or answers; None: from none."""
    reward_settings: ClassVar[str | None] = None
    """The same for a run that learns from rewards alone."""

    def __init__(self, *arguments: Any) -> None:  # noqa: B027 (most keep nothing)
        """Keep nothing; a class that needs its settings or the run's configuration has an ``__init__`` of its own."""

    @abstractmethod
    def make(self, report: ReportFn) -> TaskInputs:
        """Make the models and data, or find them where they were made before. Raises RunFailed where that fails."""

    @abstractmethod
    def model_configs(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the config.json of the models ``student`` and ``teacher``, for planning without making them."""


def task_of(config: Config) -> Task:
    """Return the task of a run that names no model. Raises ConfigError where it names no task either."""
    name = config.data.task
    if name is None:
        raise ConfigError(f"no model is named: set model.path, or data.task to one of {', '.join(TASKS.names())}")
    try:
        task: Task = config.data.build_named(name, config)
    except TypeError as error:
        raise ConfigError(f"data.task={name} cannot be made: {one_line(error)}") from None
    return task


def make_inputs(config: Config, report: ReportFn) -> TaskInputs:
    """Make the models and data of a run by its task. Raises RunFailed by the task's name where it makes none."""
    task, setting = task_of(config), f"data.task={config.data.task}"
    try:
        made = task.make(report)
    except (RunFailed, ConfigError, SignalExit):
        raise
    except (Exception, SystemExit) as error:  # a user's task may raise anything
        raise RunFailed(f"{setting}: {describe_raised(error)}") from error
    if not isinstance(made, TaskInputs):
        raise RunFailed(f"{setting} makes {type(made).__name__}: expected gkd.data.task.TaskInputs")
    return made


def require_teacher(config: Config, has_teacher: bool) -> None:
    """Raise ConfigError where the algorithm needs a teacher and the task makes none."""
    if config.algorithm.needs_teacher and not has_teacher:
        name = config.algorithm.name
        raise ConfigError(f"data.task={config.data.task} makes no teacher, and algorithm.name={name} needs one")
