"""What the loop drives, and where it writes what it did."""

from __future__ import annotations

from dataclasses import dataclass, field

from gkd.actor.group import ActorGroup
from gkd.cluster.workers.reports import WorkerReport, WorkerReports
from gkd.config.device import Device
from gkd.data.model_info import ModelInfo
from gkd.data.stream import PromptStream
from gkd.driver.checkpoints.saving import Checkpoints
from gkd.driver.groups.weight_sync import WeightSync
from gkd.driver.validation.best import BestModel
from gkd.driver.validation.early_stop import EarlyStop
from gkd.driver.validation.held_out import Validation
from gkd.driver.validation.val_sets import ValSets
from gkd.observability.metrics import JsonLines
from gkd.observability.progress import Progress
from gkd.observability.samples import SampleLog
from gkd.observability.timeline import Timeline
from gkd.rollout.dataset_answers import DatasetAnswers
from gkd.rollout.group import RolloutGroup


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything the loop drives, started and holding the same weights."""

    prompts: PromptStream
    rollout: RolloutGroup
    actor: ActorGroup
    sync: WeightSync
    validation: Validation
    val_sets: ValSets
    n_gpus: int
    model: ModelInfo
    """The student."""
    device: Device
    """The actor's."""
    reports: WorkerReports = field(default_factory=WorkerReports)
    answers: DatasetAnswers | None = None
    """Answers that are learned from in place of samples; the engines are then for validation alone."""

    def report(self) -> list[WorkerReport]:
        """Return what the workers of every group state of themselves."""
        return self.reports.read([self.actor.group, self.rollout.living_group, *self.rollout.engines.scorers.groups])


@dataclass(frozen=True, slots=True)
class RunLog:
    """The files that the loop writes to."""

    metrics: JsonLines
    samples: SampleLog
    progress: Progress
    checkpoints: Checkpoints
    timeline: Timeline
    best: BestModel | None
    stop: EarlyStop

    @property
    def stops_early(self) -> bool:
        """Whether the run ends before its last step."""
        return self.stop.reason is not None
