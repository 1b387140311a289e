"""How many engines answer, and over how many GPUs each: ``evaluate.mode``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gkd.cluster.gpu import VISIBLE, nvml_uuids, usable_devices
from gkd.config import Config, Rollout
from gkd.config.device import GB, installed_device
from gkd.errors import ConfigError
from gkd.planning.layout import Layout, Models, gpu_hardware
from gkd.planning.memory.cache import find_width_obstacle
from gkd.planning.memory.pools import GroupMemory, pool_memory
from gkd.planning.shapes import ModelShape
from gkd.planning.stored import read_shape


def gpus_here(config: Config) -> int:
    """Return the GPUs that a private Ray on this machine has: simulated ones, else those that can be computed on.

    One is simulated where there are none.
    """
    simulated = config.cluster.simulate_gpus
    if isinstance(simulated, int):
        return simulated
    real = len(usable_devices(os.environ.get(VISIBLE), nvml_uuids())) if installed_device() != "cpu" else 0
    return max(1, real)


def with_engines(config: Config, gpus_of_nodes: Sequence[int], model: tuple[str, str], on_gpus: bool) -> Config:
    """Return ``config`` with the pool of engines that ``evaluate.mode`` means for ``model``, a name and a directory.

    ``gpus_of_nodes``: GPUs that are free on each node; of those that ``rollout.gpus`` names, all are taken to be.
    ``on_gpus``: whether they are real ones. Raises ConfigError where the model fits on no number of them.
    """
    rollout = config.rollout
    n, nnodes = _share(rollout, gpus_of_nodes)
    name, path = model
    match config.evaluate.mode:
        case "single":
            tp, nnodes = rollout.tensor_parallel_size, 1
            n = tp
        case "data_parallel":
            tp = rollout.tensor_parallel_size
        case "sharded":
            shape = read_shape(path, f"models.{name}")
            tp, nnodes = max(width for width in _widths(rollout, n) if not find_width_obstacle(shape, width)), 1
            n = tp
            if tp == 1 and len(_widths(rollout, n)) == 1 and not rollout.engine_class.tensor_parallel:
                raise ConfigError(f"evaluate.mode=sharded: rollout.engine={rollout.engine} runs on one GPU")
        case _:
            tp = rollout.tensor_parallel_size
            if on_gpus and tp == 1:
                tp = find_smallest_width(config, model, n)
    if tp > n:
        raise ConfigError(f"rollout.tensor_parallel_size={tp}: a node has {n} GPUs for an evaluation")
    return _with_pool(config, n - n % tp, nnodes, tp)


def _with_pool(config: Config, n: int, nnodes: int, tp: int) -> Config:
    """Return ``config`` with a pool of ``n`` GPUs a node; exact GPUs that are named stay, the first of them."""
    pool: dict[str, Any] = {"n_gpus_per_node": n, "nnodes": nnodes, "tensor_parallel_size": tp, "colocate_with": None}
    if config.rollout.gpus is not None:
        pool["gpus"] = config.rollout.gpus[:n]
    if config.rollout.gpus_by_node is not None:
        pool["gpus_by_node"] = [node_gpus[:n] for node_gpus in config.rollout.gpus_by_node[:nnodes]]
    return config.with_settings({f"rollout.{name}": value for name, value in pool.items()})


def _share(rollout: Rollout, gpus_of_nodes: Sequence[int]) -> tuple[int, int]:
    """Return GPUs a node and nodes that make the most GPUs, as a pool has as many on each of its nodes."""
    if (named := rollout.ranges()) is not None:
        return len(named[0]), rollout.nnodes
    free = [n for n in gpus_of_nodes if n]
    if not free:
        raise ConfigError("no GPU is free for an evaluation: cluster.simulate_gpus=1 computes on the CPU")
    return max(((size, sum(n >= size for n in free)) for size in set(free)), key=lambda pool: pool[0] * pool[1])


def _widths(rollout: Rollout, n: int) -> list[int]:
    return list(range(1, n + 1)) if rollout.engine_class.tensor_parallel else [1]


def find_smallest_width(config: Config, model: tuple[str, str], n: int) -> int:
    """Return the fewest GPUs that an engine with the model fits on, by the plan. Raises ConfigError for none."""
    shape = read_shape(model[1], f"models.{model[0]}")
    tried = [
        (width, memory_of_engine(config, shape, width))
        for width in _widths(config.rollout, n)
        if not find_width_obstacle(shape, width)
    ]
    return choose_width(f"models.{model[0]}", tried, lambda memory: memory.fits or not config.plan.check)


def memory_of_engine(config: Config, shape: ModelShape, width: int) -> GroupMemory:
    """Return what an engine over ``width`` GPUs needs of each, by ``gkd plan``."""
    lengths = [
        eval_set.max_response_length or config.rollout.max_response_length for eval_set in config.evaluate.sets.values()
    ]
    update = {"n_gpus_per_node": width, "nnodes": 1, "tensor_parallel_size": width, "max_response_length": max(lengths)}
    pool = config.rollout.model_copy(update=update)
    planned = config.with_settings({"rollout": pool, "algorithm.loss.top_k": 1})  # there is no teacher
    memory = pool_memory(Layout(planned, Models(shape, None, None), gpu_hardware(config.plan)), "rollout", pool)
    pushed = "weights being received"  # which no actor sends here
    return replace(memory, items={name: size for name, size in memory.items.items() if name != pushed})


def choose_width(name: str, tried: Sequence[tuple[int, GroupMemory]], fits: Callable[[GroupMemory], bool]) -> int:
    """Return the first width whose memory ``fits``. Raises ConfigError, naming the last, where none does."""
    for width, memory in tried:
        if fits(memory):
            return width
    width, memory = tried[-1]
    short = memory.shortage or f"{-memory.margin / GB:.1f} GB short"
    raise ConfigError(
        f"{name}: an engine over {width} GPU{'s' * (width != 1)} of {memory.available / GB:.1f} GB is {short}; more "
        "GPUs or a larger rollout.gpu_memory_utilization would do, plan.check=false starts it all the same"
    )


def have_same_pool(first: Config, second: Config) -> bool:
    """Return whether two configurations have their engines on the same GPUs."""
    fields = ("n_gpus_per_node", "nnodes", "gpus", "gpus_by_node", "tensor_parallel_size")
    return all(getattr(first.rollout, field) == getattr(second.rollout, field) for field in fields)
