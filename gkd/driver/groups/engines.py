"""Starting the rollout engines: all at the beginning, and one again that died."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gkd.cluster.health.watched import RestartPolicy
from gkd.cluster.workers.engines import Engines
from gkd.cluster.workers.environment import environment
from gkd.cluster.workers.group import Group, PendingCall, gather
from gkd.cluster.workers.placement import Placement
from gkd.config import Config
from gkd.driver.inputs.find import Inputs
from gkd.inference.engine import EngineSpec
from gkd.scoring.watch import ScorerWatch

WORKER, FOLLOWER = "gkd.rollout.worker:RolloutWorker", "gkd.rollout.worker:rollout_follower"
StartWorker = Callable[[int], tuple[Group, int | None]]
"""Starts a new worker in place of an engine's, by the engine's number. Returns it, not built yet, and the bytes that
the engine's cache is to have on each GPU; None: what the engine measures, if it has a cache."""


def make_restart_policy(
    config: Config, placement: Placement, engines: Engines, in_turn: bool, start: Callable[[int], Group]
) -> RestartPolicy:
    """Return how ``engines`` that die are started again by ``start``, if they are.

    ``in_turn``: others have their GPUs.
    """
    cluster, obstacle = config.cluster, None
    if in_turn:
        obstacle = "where groups have GPUs in turn (cluster.offload) none is started again"
    elif engines.nnodes > 1:
        obstacle = f"one over {engines.nnodes} nodes is not started again"
    within_s = cluster.start_timeout_s + cluster.reserve_timeout_s
    return RestartPolicy(cluster.worker_restarts, start, placement.session.threads, obstacle, within_s)


def prepare_restarts(config: Config, placement: Placement, engines: Engines) -> StartWorker:
    """Return what starts workers of ``engines`` again; to be called after the build.

    On its GPU an engine's cache has the size of before: what is free there, while others use it, is no measure.
    """
    limit = config.cluster.start_timeout_s
    caches = engines.leaders.control("cache_bytes", timeout_s=limit, activity="reporting how large caches are")

    def start(engine: int) -> tuple[Group, int | None]:
        worker = engines.start_again(placement, engine)
        is_same_gpu = worker.reports[0].gpu_uuids == engines.leaders.reports[engine].gpu_uuids
        return worker, caches[engine] if is_same_gpu else None

    return start


@dataclass(frozen=True, slots=True)
class RolloutEngines:
    """The engines that sample, on the workers of ``placement``."""

    config: Config
    inputs: Inputs
    placement: Placement
    engines: Engines

    def build(self) -> list[PendingCall]:
        """Start building all of them."""
        arguments = [self._arguments(engine) for engine in range(len(self.engines.leaders))]
        return self.engines.submit_build(WORKER, FOLLOWER, arguments, self._environment)

    def make_restart_policy(self, clients: Mapping[str, dict[str, Any]], scorers: ScorerWatch) -> RestartPolicy:
        """Return how one that died is started again, and reaches the scorers that are there. After the build."""
        limit = self.config.cluster.start_timeout_s
        start_worker = prepare_restarts(self.config, self.placement, self.engines)

        def start(engine: int) -> Group:
            worker, cache_bytes = start_worker(engine)
            config, spec = self._arguments(engine)
            spec = replace(spec, cache_bytes=cache_bytes)
            gather([worker.submit_build(WORKER, [(config, spec, None)], environment=self._environment)], limit)
            absent = [expected.name for expected in scorers.list_absent_replicas()]
            reached = {model: {**arguments, "absent": absent} for model, arguments in clients.items()}
            worker.control("pipeline.connect", reached, timeout_s=limit, activity="connecting to the models that score")
            return worker

        in_turn = self.config.cluster.offload is True
        return make_restart_policy(self.config, self.placement, self.engines, in_turn, start)

    def _arguments(self, engine: int) -> tuple[Config, EngineSpec]:
        inputs, device = self.inputs, self.engines.leaders.reports[engine].device
        spec = EngineSpec.for_rollout(self.config, inputs.student, inputs.model, inputs.max_length, engine, device)
        return self.config, spec

    @property
    def _environment(self) -> dict[str, str]:
        device = self.engines.leaders.reports[0].device
        return environment(device, [self.inputs.student], self.config.cluster.cpu_threads)
