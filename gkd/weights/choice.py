"""Which way weights take from the actor to the engines, by where both are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gkd.cluster.report import Report
from gkd.config import Rollout
from gkd.errors import ConfigError

Way = Literal["object_store", "ipc", "nccl"]
WAYS: tuple[Way, ...] = ("ipc", "nccl", "object_store")
"""The fastest first."""


def choose(wanted: Literal["auto"] | Way, engine: Rollout, actor: Sequence[Report], rollout: Sequence[Report]) -> Way:
    """The way for ``weights.transfer=wanted``.

    ``actor`` and ``rollout`` are the reports of all workers in rank order, also those of an engine that spans several
    GPUs. Raises ConfigError for a way that cannot work there.
    """
    why_not = {way: _why_not(way, engine, actor, rollout) for way in WAYS}
    possible = [way for way in WAYS if why_not[way] is None]
    if wanted == "auto":
        return possible[0]
    if (reason := why_not[wanted]) is not None:
        others = " or ".join(f"weights.transfer={way}" for way in possible)
        raise ConfigError(f"weights.transfer={wanted}: {reason}; {others} would work")
    return wanted


def _why_not(way: Way, engine: Rollout, actor: Sequence[Report], rollout: Sequence[Report]) -> str | None:
    if way == "object_store":
        return None
    if not engine.engine_class.gpu_transfers:
        return f"rollout.engine={engine.engine} takes no weights from GPU to GPU"
    for report in (*actor, *rollout):
        if report.device == "cpu":
            return f"{report} computes on a CPU"
        if any(uuid.startswith("MIG-") for uuid in report.gpu_uuids):
            return f"{report} is on a slice of a GPU (MIG)"
    return _no_ipc(actor, rollout) if way == "ipc" else _no_nccl(actor, rollout)


def _no_ipc(actor: Sequence[Report], rollout: Sequence[Report]) -> str | None:
    shared = {uuid for report in actor for uuid in report.gpu_uuids}
    alone = [report for report in rollout if not set(report.gpu_uuids) <= shared]
    return f"{alone[0]} is on a GPU without an actor, {alone[0].gpu_uuids[0]}" if alone else None


def _no_nccl(actor: Sequence[Report], rollout: Sequence[Report]) -> str | None:
    owner = dict.fromkeys(actor[0].gpu_uuids, actor[0])
    for report in rollout:
        for uuid in report.gpu_uuids:
            if uuid in owner:
                return f"{report} and {owner[uuid]} are both on {uuid}, and NCCL takes one rank a GPU"
            owner[uuid] = report
    return None
