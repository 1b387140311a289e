"""Weights from the actor to the engines, by the way that the placement allows; the driver's part of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gkd.actor.group import ActorGroup
from gkd.cluster.assignment import Report
from gkd.cluster.failure import WorkerDied
from gkd.cluster.group import Pending, first_death, gather
from gkd.config import Config
from gkd.errors import RunFailed
from gkd.rollout.group import RolloutGroup
from gkd.weights.pieces import Piece

DEATH_IS_KNOWN_S = 5.0
"""Ray tells of a process that ended within this time."""


class WeightSync:
    """Has every living engine serve the actor's weights, whole, before it samples again.

    Through the object store the actor puts all of them there, and each engine fetches them. From GPU to GPU they go in
    pieces, one after the other, each loaded everywhere before the next one is packed, so that a piece is all the memory
    it takes. An engine that dies is left out, as it is while sampling; only in the middle of an NCCL broadcast the
    others and the actor cannot be had back, and the run ends.

    ``workers`` are the reports of all of the rollout group's workers, ``config.weights.transfer`` is the way chosen.
    """

    def __init__(self, actor: ActorGroup, rollout: RolloutGroup, workers: Sequence[Report], config: Config) -> None:
        self.actor, self.rollout, self.config = actor, rollout, config
        self._span = config.rollout.tensor_parallel_size
        self._gpus = [{uuid for r in workers[i : i + self._span] for uuid in r.gpu_uuids}
                      for i in range(0, len(workers), self._span)]  # fmt: skip
        self._group: tuple[int, list[int]] | None = None
        """Actor rank 0's process, and the engines that are in the NCCL group with it."""
        self._end = 0.0  # of the push under way (time.monotonic)

    def push(self) -> None:
        """Send the current weights. Raises RunFailed when that fails or takes longer than ``weights.timeout_s``."""
        self.rollout.colocation.prepare_push()
        limit = self.config.weights.timeout_s
        if self.config.weights.transfer == "object_store":
            self.rollout.receive(self.actor.publish(), limit)
            return
        self._end = time.monotonic() + limit
        self._push_pieces(lambda: max(0.0, self._end - time.monotonic()))

    def _push_pieces(self, left: Callable[[], float]) -> None:
        version, limit = self.actor.version, self.config.weights.timeout_s
        about = f"weights version {version} (weights.timeout_s={limit:g})"
        nccl = self.config.weights.transfer == "nccl"
        self._tell("halt", version, left=left, what=f"becoming idle for {about}")
        if nccl and self._group != self._members():
            self._meet(left, about)
        opening = [(version, packs) for packs in self._packing()]
        self.actor.group.call_each("open_push", opening, timeout_s=left(), what=f"beginning to pack {about}")
        while (piece := self._next_piece(left, about)) is not None:
            what = f"loading piece {piece.number + 1} of {about}"
            if nccl:
                sending = self.actor.group.only([0]).submit("send_piece", what=f"sending piece {piece.number + 1}")
                self._together([sending, self._engines("take", piece, what=what)], left, what)
            else:
                self._tell("take", piece, left=left, what=what)
        told = self._tell("serve_version", version, left=left, what=f"serving {about}")
        for engine, served in told.items():
            if served != version:
                raise RunFailed(f"{self.rollout.group.reports[engine]} serves weights {served} instead of {version}")

    def _tell(self, method: str, *args: object, left: Callable[[], float], what: str) -> dict[int, Any]:
        """Call ``method`` of every living engine. The push has the time again that was waited for one that was lost."""
        began, alive = time.monotonic(), len(self.rollout.alive)
        answers = self.rollout.tell(method, *args, timeout_s=left(), what=what)
        if len(self.rollout.alive) < alive:
            self._end += time.monotonic() - began
        return answers

    def _packing(self) -> list[bool]:
        """Whose pieces engines take: by NCCL rank 0's, by IPC those of every rank that shares its GPU with an engine.

        A handle that nobody opens keeps its memory for good, so none are made for engines that died before.
        """
        if self.config.weights.transfer == "nccl":
            return [rank == 0 for rank in range(len(self.actor.group))]
        wanted = {uuid for engine in self.rollout.alive for uuid in self._gpus[engine]}
        return [not wanted.isdisjoint(report.gpu_uuids) for report in self.actor.group.reports]

    def _next_piece(self, left: Callable[[], float], about: str) -> Piece | None:
        """The next piece, with the handles of all ranks that have packed it."""
        told: list[Piece | None] = self.actor.group.call("next_piece", timeout_s=left(), what=f"packing {about}")
        pieces = [piece for piece, packs in zip(told, self._packing(), strict=True) if packs and piece is not None]
        if not pieces:
            return None
        return replace(pieces[0], handles={gpu: handle for piece in pieces for gpu, handle in piece.handles.items()})

    def _meet(self, left: Callable[[], float], about: str) -> None:
        """Have actor rank 0 and the living engines form an NCCL group."""
        root, engines = self.actor.group.only([0]), list(self.rollout.alive)
        self._group = None
        what = f"meeting over NCCL for {about}"
        unique_id = root.call("new_group", timeout_s=left(), what=what)[0]
        calls = [root.submit("join_engines", unique_id, 1 + self._span * len(engines), what=what),
                 self._engines("join_actor", unique_id, engines, self._span, what=what)]  # fmt: skip
        self._together(calls, left, what)
        self._group = self._members()

    def _members(self) -> tuple[int, list[int]]:
        return self.actor.group.reports[0].pid, list(self.rollout.alive)

    def _engines(self, method: str, *args: object, what: str) -> Pending:
        return self.rollout.group.only(self.rollout.alive).submit_control(method, *args, what=what)

    def _together(self, calls: list[Pending], left: Callable[[], float], what: str) -> None:
        """Wait for calls whose workers wait for each other, so that the first death ends the run."""
        try:
            gather(calls, left())
        except RunFailed as failure:
            # Whoever lost its partner may say so before Ray has noticed the death that is behind it.
            death = failure if isinstance(failure, WorkerDied) else first_death(calls, DEATH_IS_KNOWN_S)
            if death is None:
                raise
            raise RunFailed(f"{death}; the others were in the middle of {what} and wait for it in NCCL") from None
