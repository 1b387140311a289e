"""The actor's ranks as processes: started, and started again; where their memory is; what a checkpoint has of them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from gkd.actor.batches import AppliedUpdate
from gkd.cluster.workers.colocation import Colocation
from gkd.cluster.workers.deadline import Deadline
from gkd.cluster.workers.environment import environment
from gkd.cluster.workers.group import (
    Attend,
    Group,
    PendingCall,
    attend_until_done,
    gather,
    gather_partners,
    is_done,
    wait,
)
from gkd.config import Config
from gkd.errors import RunFailed

log = logging.getLogger("gkd")

ANSWERS_S = 30.0
"""Time that a rank which is not hung takes to report which step its weights are of."""
WHOLE_S = 10.0
"""Time that ranks have to come to the end of an optimizer step, and all of them to the same."""
KEEP_S = 60.0
"""Time that ranks have to hand on what they have while some of them wait for another one."""
RELEASES_GIL = {"TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0"}
"""Has Triton launch what was compiled. torch's own launcher holds the GIL: a rank whose launches wait for another rank,
one whose memory ran out, could hand on nothing."""


class ActorRanks:
    """All ranks as one. What they train on is :class:`gkd.actor.group.ActorGroup`'s.

    ``restart`` ends the ranks' processes, whatever they wait for, and returns new ones in their place.
    """

    def __init__(
        self,
        group: Group,
        config: Config,
        model_path: str,
        restart: Callable[[], Group],
        colocation: Colocation | None = None,
    ) -> None:
        self.group, self.config, self.model_path, self.version = group, config, model_path, 0
        self._restart, self.colocation = restart, colocation or Colocation()
        self._loaded = False
        self._writing: PendingCall | None = None  # files of a checkpoint, by the present processes

    def submit_build(self) -> PendingCall:
        """Start building every rank, without a model yet."""
        world, device = len(self.group), self.group.reports[0].device
        args = [(self.config, self.model_path, rank, world, device) for rank in range(world)]
        variables = environment(device, [self.model_path], self.config.cluster.cpu_threads)
        variables.pop("TORCHDYNAMO_DISABLE", None)  # which is for engines; here actor.compile decides
        if world > 1:
            variables |= RELEASES_GIL
        return self.group.submit_build("gkd.actor.worker:ActorWorker", args, environment=variables)

    def load(self) -> int:
        """Have the ranks meet and read the student; returns its number of parameters."""
        n_parameters: list[int] = gather_partners([self.submit_load()], self.config.cluster.start_timeout_s)[0]
        return n_parameters[0]

    def submit_load(self) -> PendingCall:
        """Have the ranks meet, once they are built, and start to read the student; the result is :meth:`load`'s."""
        self.colocation.onload_actor()
        limit = self.config.cluster.start_timeout_s
        host, port = self.group.select([0]).call("open_store", timeout_s=limit, activity="opening the rendezvous")[0]
        self.group.call("join", host, port, timeout_s=limit, activity="meeting the other ranks")
        self._loaded = True
        return self.group.submit("load", activity="loading the student (cluster.start_timeout_s)")

    def _start_again(self) -> None:
        """Start new processes in place of all ranks, which go on with weights and optimizer state of the old ones.

        Where one rank ran out of memory the others wait for it in a collective, and only their end gets them out of it;
        FSDP in that rank takes itself to be within a pass that never ends; and its memory is in pieces.
        """
        text = "memory ran out on one of the actor's GPUs; its processes are started again"
        log.warning(text, extra={"kind": "restart"})
        limit = self.config.cluster.start_timeout_s
        if self._writing is not None:  # a checkpoint, which would end with them
            with suppress(RunFailed):  # late, which is known to those who wait for it
                wait(self._writing, self.config.trainer.save_timeout_s)
        snapshots = self.group.submit_control("state.keep", activity="handing on what the ranks have")
        if not is_done(snapshots, min(KEEP_S, limit)):  # copies may be stuck behind kernels that wait for another rank
            self.group.submit_control("state.abort_collectives", activity="aborting what the ranks wait in")
        wait(snapshots, limit)
        self.group = self._restart()
        gather([self.submit_build()], limit)
        self.load()
        gather_partners([self.group.submit_each("state.take_over", [[ref] for ref in snapshots.refs])], limit)

    def offload(self) -> None:
        """Have all ranks move what they hold to the host."""
        self.group.call("state.offload", timeout_s=self.config.weights.timeout_s, activity="offloading the actor")

    def onload(self) -> None:
        """Have all ranks move it back to their GPUs."""
        if self._loaded:
            self.group.call("state.onload", timeout_s=self.config.weights.timeout_s, activity="onloading the actor")

    @property
    def dtype(self) -> str:
        """What the ranks compute in."""
        return self.config.model.dtype_on(self.group.reports[0].device)

    def is_responding(self) -> bool:
        """Return whether every rank that is alive answers."""
        try:
            self.group.control("state.read_applied", timeout_s=ANSWERS_S, activity="answering", keep_deaths=True)
        except RunFailed:
            return False
        return True

    def measure_idle(self) -> float:
        """Return seconds since any rank began a micro-batch; infinite where none that answers ever did."""
        call = self.group.submit_control("state.measure_idle", activity="reporting what it does")
        (answers,) = gather([call], ANSWERS_S, keep_deaths=True, keep_late=True)
        return min((answer for answer in answers if isinstance(answer, float)), default=math.inf)

    def read_applied(self) -> AppliedUpdate:
        """Return the step that the weights of all ranks are of, whatever these are doing.

        Raises RunFailed when one does not answer, or they are in the middle of a step for longer than an optimizer step
        takes.
        """
        return self._call_in_one_step("state.read_applied", ANSWERS_S, "reporting which step it is at")

    def stage(self) -> AppliedUpdate:
        """Have every rank copy its weights and optimizer state, for :meth:`write_staged`; returns their step.

        Raises what :meth:`read_applied` raises.
        """
        self.read_applied()  # a rank that is hung is found out here
        return self._call_in_one_step("state.stage", self.config.trainer.save_timeout_s, "copying a checkpoint")

    def _call_in_one_step(self, method: str, timeout_s: float, activity: str) -> AppliedUpdate:
        end = math.inf  # counts from the first answer: a copy may take longer than an optimizer step
        while True:
            results: list[AppliedUpdate | None] = self.group.control(method, timeout_s=timeout_s, activity=activity)
            if results[0] is not None and all(
                applied is not None and applied.step == results[0].step for applied in results
            ):
                return results[0]
            end = min(end, time.monotonic() + WHOLE_S)
            if time.monotonic() >= end:
                raise RunFailed("the actor is in the middle of an update")
            time.sleep(0.2)

    def write_staged(self, directory: str) -> PendingCall:
        """Start writing what :meth:`stage` copied; each rank returns the name and the sum of its file."""
        self._writing = self.group.submit_control("state.write_staged", directory, activity=f"writing {directory}")
        return self._writing

    def load_state(self, files: Sequence[str], step: int) -> None:
        """Go on with what the ranks wrote after ``step``, in whatever number they were."""
        self.colocation.onload_actor()
        limit = self.config.trainer.save_timeout_s
        activity = "reading the checkpoint (trainer.save_timeout_s)"
        self.group.call("state.load", files, step, timeout_s=limit, activity=activity)
        self.version = step

    def save(self, directory: str, attend: Attend | None = None) -> None:
        """Write the student in Hugging Face format; ``attend`` is called meanwhile (:func:`attend_until_done`)."""
        self.colocation.onload_actor()
        deadline = Deadline(self.config.trainer.save_timeout_s)
        call = self.group.submit("state.save", directory, activity="writing the student (trainer.save_timeout_s)")
        if attend is not None:
            attend_until_done(call, deadline.limit_s, attend)
        gather_partners([call], deadline)
