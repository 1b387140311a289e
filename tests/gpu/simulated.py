"""A run of gkd.main on simulated GPUs, whose weights go as between GPUs: by a copy for ``ipc``, by gloo otherwise.

    python -m tests.gpu.simulated +recipe=NAME [OVERRIDES]

What runs so is all around CUDA and NCCL: who packs, joins, receives and loads. ``weights.transfer=auto`` chooses
between ``ipc`` and ``nccl`` as it does between the real ones; NAMES are what stands for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from gkd.config.cluster import TRANSFERS
from gkd.config.transfer import Place
from tests.ray.weights.wire import CopyIpc, GlooNccl

AUTOMATIC = {"ipc": "tests.gpu.simulated:Ipc", "nccl": "tests.gpu.simulated:Nccl"}
NAMES = AUTOMATIC | {"nccl_m2n": "tests.gpu.simulated_m2n:M2n"}


class Ipc(CopyIpc):
    """``ipc`` between workers that have the same simulated GPUs."""

    @classmethod
    def find_obstacle(cls, actor: Sequence[Place], rollout: Sequence[Place]) -> str | None:
        """Return why not every engine shares its GPUs with an actor rank."""
        return super().find_obstacle(_on_gpus(actor), _on_gpus(rollout))


class Nccl(GlooNccl):
    """``nccl`` between workers that have simulated GPUs of their own."""

    @classmethod
    def find_obstacle(cls, actor: Sequence[Place], rollout: Sequence[Place]) -> str | None:
        """Return why not every worker has its own."""
        return super().find_obstacle(_on_gpus(actor), _on_gpus(rollout))


def _on_gpus(workers: Sequence[Place]) -> list[Place]:
    return [SimpleNamespace(device="cuda", gpu_uuids=worker.gpu_uuids) for worker in workers]


if __name__ == "__main__":
    from gkd.cli.command import run
    from gkd.config import transfer

    transfer.require_gpus = lambda *_: None
    entries = TRANSFERS.entries
    assert isinstance(entries, dict)
    others = dict(entries)
    entries.clear()
    entries.update({name: name for name in AUTOMATIC.values()} | others)
    run("train")
