"""What one rank of the actor has, on its way elsewhere: a new process, a checkpoint, the host, a model's files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group
from torch.optim import Optimizer

from gkd.actor.batches import AppliedUpdate, Metrics
from gkd.actor.model import Student
from gkd.actor.pretrained import write_pretrained
from gkd.actor.state import Part, load_state, move, part_of, put_part
from gkd.actor.training import LogprobsByPlace, RankTrainer
from gkd.cluster.workers.activity import record_activity
from gkd.durable import Checksum
from gkd.errors import StudentNotWritten


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    """State of a rank: its part of weights and optimizer state, and the log-probabilities that it keeps.

    ``applied`` is the step that the weights are of, None in the middle of one, of which ``rows`` are done and which
    started from the weights ``version``.
    """

    part: Part
    old: LogprobsByPlace
    reference: LogprobsByPlace
    applied: AppliedUpdate | None
    rows: tuple[Metrics, ...]
    version: int


class RankState:
    """Weights and optimizer state of the rank of ``trainer``, whose student came from ``model_path`` and computes in
    ``dtype``.
    """

    def __init__(self, trainer: RankTrainer, model_path: str, dtype: torch.dtype) -> None:
        self._trainer, self._staging, self._device = trainer, trainer.staging, trainer.device
        self._model_path, self._dtype = model_path, dtype
        self._student: Student = trainer.student
        self._optimizer: Optimizer = trainer.optimizer

    def read_applied(self) -> AppliedUpdate | None:
        """Return the step that the weights are of; None in the middle of one."""
        return self._staging.applied

    def shares_prompts(self) -> bool:
        """Return whether a prompt is computed once for its samples in a micro-batch."""
        return self._trainer.shares_prompts

    def measure_idle(self) -> float:
        """Return seconds since this rank began a micro-batch; infinite before its first."""
        return time.monotonic() - self._student.began

    def keep(self) -> RankSnapshot:
        """Return what a new process in place of this one needs; also while this rank waits in a collective."""
        trainer, staging = self._trainer, self._staging
        part = part_of(self._optimizer, self._device, staging.updated)
        return RankSnapshot(part, trainer.old, trainer.reference, staging.applied, staging.rows, trainer.version)

    def abort_collectives(self) -> None:
        """Have this rank wait for no other any more. It is of no further use than to end, and to :meth:`keep` before.

        Once kernels behind a collective fill CUDA's queue, the thread that adds to it keeps all others from calling
        CUDA, also for copies on another stream. What comes out of a collective that was aborted reaches no weights.
        """
        self._staging.freeze()
        _abort_process_group()

    def take_over(self, snapshot: RankSnapshot) -> None:
        """Go on with what the process before this one had."""
        put_part(self._optimizer, snapshot.part)
        self._trainer.reread_optimizer()
        self._trainer.old, self._trainer.reference = snapshot.old, snapshot.reference
        self._trainer.start_version = snapshot.version
        self._staging.set(snapshot.applied, snapshot.rows)

    def stage(self) -> AppliedUpdate | None:
        """Copy weights and optimizer state for :meth:`write_staged`, on any thread, whatever this rank is doing.

        Returns the step that the copy is of; None, and nothing is copied, in the middle of one.
        """
        return self._staging.copy(self._optimizer)

    def write_staged(self, directory: str) -> tuple[str, Checksum]:
        """Write what :meth:`stage` copied to a file in ``directory``, on any thread; returns its name and sum."""
        file = Path(directory, f"rank_{self._trainer.rank:05}.safetensors")
        return file.name, self._staging.write(self._optimizer, file)

    def load(self, files: Sequence[str], step: int) -> None:
        """Go on with what all ranks of some number wrote after ``step``."""
        load_state(self._student, self._optimizer, [Path(file) for file in files])
        self._trainer.reread_optimizer()
        self._staging.set(AppliedUpdate(step))

    @record_activity("save", lambda state, *_: state._trainer.version)
    def save(self, directory: str) -> None:
        """Write the student and its tokenizer in Hugging Face format. A collective; rank 0 writes.

        An adapter is merged into it, and written by itself as well, in peft's format, to ``adapter``. Raises
        StudentNotWritten, on rank 0, once all ranks are done with it.
        """
        lora, writes = self._trainer.config.actor.lora, self._trainer.rank == 0
        try:
            write_pretrained(self._student, self._model_path, lora, self._dtype, Path(directory), writes)
        except StudentNotWritten:
            dist.barrier()  # where the others wait
            raise
        dist.barrier()

    @record_activity("offload", lambda state, *_: state._trainer.version)
    def offload(self) -> None:
        """Move weights and optimizer state to the host, unless they live there."""
        self._move(torch.device("cpu"))
        self._trainer.is_offloaded = True

    @record_activity("onload", lambda state, *_: state._trainer.version)
    def onload(self) -> None:
        """Move them back."""
        self._move(self._device)
        self._trainer.is_offloaded = False

    def _move(self, device: torch.device) -> None:
        if not self._trainer.config.actor.offload_weights:
            move(self._student, self._optimizer, device)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
