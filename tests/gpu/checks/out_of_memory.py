"""An update that runs out of memory, on purpose: it is done again in smaller micro-batches, with the same gradient."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gkd.actor.group import ActorGroup
from gkd.cluster.session.connect import connect
from gkd.cluster.workers.group import gather
from gkd.cluster.workers.placement import lay_out, place
from gkd.config import load
from tests.actor import models
from tests.gpu.checks.context import Context, require
from tests.ray.actor.ranks import put
from tests.ray.actor.test_memory import leave

TOKENS = 30_000
ROOM_MB, ROOM_MB_GPU = 200, 48  # more than the process has before the update, which needs more; in bfloat16 about half


def update_again(context: Context) -> None:
    """With so little memory left that 30,000 tokens at once do not fit, against small micro-batches from the start."""
    _update_again(context, n_ranks=1, n_layers=models.SHAPE["num_hidden_layers"])


def update_again_of_two(context: Context) -> None:
    """Two ranks, of which the second has so little: the first waits for it with more layers than CUDA queues.

    They are compiled on GPUs, where what launches their kernels may keep a process's other threads from running.
    """
    _update_again(context, n_ranks=2, n_layers=32)


def _update_again(context: Context, n_ranks: int, n_layers: int) -> None:
    path = str(context.scratch / "out-of-memory")
    torch.manual_seed(0)
    shape = {**models.SHAPE, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    shape["num_hidden_layers"] = n_layers
    LlamaForCausalLM(LlamaConfig(**{**shape, "max_position_embeddings": 16384})).save_pretrained(path)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: lines.append(entry.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gkd").addHandler(handler)
    samples, small = models.scored(200, k=4, lengths=(80, 100)), models.scored(8, k=4, lengths=(8, 9))
    norms = {}
    for budget, limited in ((2_000, False), (TOKENS, True)):
        with _actor(path, budget, n_ranks, n_ranks > 1 and not context.rehearsal) as actor:
            actor.update(put(small), 1)
            if limited:
                _leave(actor, context)
            norms[limited] = actor.update(put(samples), 2)["actor/grad_norm"]
    again = [line for line in lines if "done again in micro-batches" in line]
    context.note(log=again, grad_norm=norms[True], grad_norm_of_small_micro_batches=norms[False])
    require(len(again) == 1, f"memory was to run out once; the log has {lines}")
    apart = abs(norms[True] - norms[False]) / norms[False]
    require(apart < (1e-4 if context.rehearsal else 2e-2), f"the gradient's norm differs by {apart:.1e}")


@contextmanager
def _actor(path: str, budget: int, n_ranks: int, compiled: bool) -> Iterator[ActorGroup]:
    """An actor alone, placed and loaded as a run has it, with micro-batches of at most ``budget`` tokens."""
    settings = {
        "actor": {"lr": 1e-6, "max_tokens_per_micro_batch": budget, "loss_chunk": 256, "compile": compiled},
        "algorithm": {"aggregation": "sequence_mean"},
        "trainer": {"total_steps": 10, "n_gpus_per_node": n_ranks},
        "cluster": {"cpu_threads": 1, "simulate_gpus": "auto", "share_gpus": True},
    }
    with connect(load(settings)) as session:
        config = lay_out(load(settings))
        placement = place(config, session)
        actor = ActorGroup(placement.groups["actor"], config, path, partial(placement.restart, "actor"))
        gather([actor.submit_build()], 120)
        actor.load()
        yield actor


def _leave(actor: Any, context: Context) -> None:
    """Let the actor's last process have only a little more than it has."""
    if context.rehearsal:
        leave(actor, ROOM_MB)
        return

    room_mb = ROOM_MB_GPU

    def limit(_: object) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (room_mb << 20)) / total)

    ray.get(actor.group.workers[-1].__ray_call__.remote(limit), timeout=60)
