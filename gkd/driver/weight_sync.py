"""Weights from the actor to the engines, by the way that the placement allows; the driver's part of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gkd.actor.group import ActorGroup
from gkd.cluster.assignment import Report
from gkd.cluster.failure import WorkerDied
from gkd.cluster.group import Pending, first_death, gather
from gkd.config import Config
from gkd.errors import RunFailed
from gkd.rollout.group import RolloutGroup
from gkd.weights.transfer import Piece, Transfer

DEATH_IS_KNOWN_S = 5.0
"""Ray tells of a process that ended within this time."""


class WeightSync:
    """Has every living engine serve the actor's weights, whole, before it samples again.

    They go in pieces, one after the other, each loaded everywhere before the next one is packed, so that a piece is all
    the memory it takes. An engine that dies is left out, as it is while sampling; only in the middle of a collective
    transfer's piece the others and the actor cannot be had back, and the run ends.

    ``workers`` are the reports of all of the rollout group's workers; ``config.weights.transfer`` is decided.
    """

    def __init__(self, actor: ActorGroup, rollout: RolloutGroup, workers: Sequence[Report], config: Config) -> None:
        self.actor, self.rollout, self.config = actor, rollout, config
        self._transfer: type[Transfer] = config.weights.transfer_class
        self._span = config.rollout.tensor_parallel_size
        self._gpus = [{uuid for r in workers[i : i + self._span] for uuid in r.gpu_uuids}
                      for i in range(0, len(workers), self._span)]  # fmt: skip
        self._group: tuple[int, list[int]] | None = None
        """Actor rank 0's process, and the engines that are in the group with it."""
        self._end = 0.0  # of the push under way (time.monotonic)

    def push(self) -> None:
        """Send the current weights. Raises RunFailed when that fails or takes longer than ``weights.timeout_s``."""
        self.rollout.colocation.prepare_push()
        limit, version = self.config.weights.timeout_s, self.actor.version
        self._end = time.monotonic() + limit
        about = f"weights version {version} (weights.timeout_s={limit:g})"
        if self._transfer.gpu_to_gpu:  # nothing is packed for an engine that is not there any more
            self._call_engines("pause", version, what=f"becoming idle for {about}")
        if self._transfer.collective and self._group != self._members():
            self._form_group(about)
        for number in itertools.count():
            piece = self._pack(version, number, about)
            served = self._load(piece, f"loading piece {number + 1} of {about}")
            if piece.last:
                break
        if self._transfer.gpu_to_gpu:
            self.actor.group.call("release_piece", timeout_s=self._left(), what=f"freeing the buffers of {about}")
        for engine, its in served.items():
            if its != version:
                raise RunFailed(f"{self.rollout.group.reports[engine]} serves weights {its} instead of {version}")

    def _left(self) -> float:
        """Return seconds that the push under way still has."""
        return max(0.0, self._end - time.monotonic())

    def _pack(self, version: int, number: int, about: str) -> Piece:
        """Return the next piece, with the contents of all ranks that have packed it for engines that live."""
        packs = self._packing()
        arguments = [(version, number, each) for each in packs]
        pieces: list[Piece] = self.actor.group.call_each(
            "pack_piece", arguments, timeout_s=self._left(), what=f"packing {about}"
        )
        return replace(pieces[0], contents=tuple(content for piece in pieces for content in piece.contents))

    def _packing(self) -> list[bool]:
        """Return by rank of the actor whether engines that live receive its pieces."""
        gpus = {uuid for engine in self.rollout.alive for uuid in self._gpus[engine]}
        return self._transfer.packing(self.actor.group.reports, gpus)

    def _load(self, piece: Piece, what: str) -> dict[int, Any]:
        """Have every living engine load a piece; returns the versions that they serve then, by engine."""
        if self._transfer.collective:
            sending = self.actor.group.only([0]).submit("broadcast_piece", what=f"sending piece {piece.number + 1}")
            served = self._together([sending, self._engines("receive", piece, what=what)], what)[1]
            return dict(zip(self.rollout.alive, served, strict=True))
        return self._call_engines("receive", piece, what=what)

    def _call_engines(self, method: str, *args: Any, what: str) -> dict[int, Any]:
        """Call ``method`` of every living engine's worker; the results by engine, without those that died of it.

        The push has the time again that was waited for an engine that was lost.
        """
        began, alive = time.monotonic(), len(self.rollout.alive)
        if not self._left():  # the time is over, and no engine hangs
            raise RunFailed(f"{what}: no time is left (weights.timeout_s={self.config.weights.timeout_s:g})")
        answers = self.rollout.tell(method, *args, timeout_s=self._left(), what=what)
        if len(self.rollout.alive) < alive:
            self._end += time.monotonic() - began
        return answers

    def _form_group(self, about: str) -> None:
        """Have actor rank 0 and the living engines join a new group."""
        root, engines = self.actor.group.only([0]), list(self.rollout.alive)
        self._group = None
        what = f"joining a group for {about}"
        address = root.call("new_group", timeout_s=self._left(), what=what)[0]
        calls = [root.submit("join_group", address, 1 + self._span * len(engines), what=what),
                 self._engines("join_group", address, engines, self._span, what=what)]  # fmt: skip
        self._together(calls, what)
        self._group = self._members()

    def _members(self) -> tuple[int, list[int]]:
        return self.actor.group.reports[0].pid, list(self.rollout.alive)

    def _engines(self, method: str, *args: object, what: str) -> Pending:
        return self.rollout.group.only(self.rollout.alive).submit_control(method, *args, what=what)

    def _together(self, calls: list[Pending], what: str) -> list[list[Any]]:
        """Wait for calls whose workers wait for each other, so that the first death ends the run; their results."""
        try:
            return gather(calls, self._left())
        except RunFailed as failure:
            # Whoever lost its partner may say so before Ray has noticed the death that is behind it.
            death = failure if isinstance(failure, WorkerDied) else first_death(calls, DEATH_IS_KNOWN_S)
            if death is None:
                raise
            raise WorkerDied(f"{death}; the others were in the middle of {what} and wait for it") from None
