"""Engines over the workers of a group: who leads, which GPUs it sees, and the parts of an engine on further nodes.

An engine of several GPUs on one node is one worker that sees all of them, while the other workers keep theirs reserved.
One that spans nodes has such a worker on each: the first leads, the others *follow*, with vLLM's processes of their
GPUs and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gkd.cluster.workers.failure import NodeLost
from gkd.cluster.workers.group import Group, PendingCall, gather
from gkd.cluster.workers.placement import Placement
from gkd.config import Config
from gkd.config.device import NodeSpan, require_device
from gkd.errors import RunFailed


@dataclass(frozen=True)
class Engines:
    """The engines of a group, in the order of ``leaders``."""

    leaders: Group
    followers: Group
    """Parts on further nodes, engine by engine; none where every engine keeps to a node."""
    timeout_s: float
    """Longest time that a worker may take to answer."""

    @staticmethod
    def from_group(group: Group, tensor_parallel_size: int, timeout_s: float) -> Engines:
        """Make engines of so many consecutive workers each. To be called after the check, before any build.

        Raises RunFailed where parts of engines have different numbers of GPUs, or a worker does not answer.
        """
        if tensor_parallel_size == 1:
            return Engines(group, group.select([]), timeout_s)
        parts = _parts(group, tensor_parallel_size)
        each = tensor_parallel_size // len(parts[0])  # parts of an engine
        heads = group.select([ranks[0] for ranks in parts])
        devices_of = [[gpu for rank in ranks for gpu in group.reports[rank].ray_gpu_ids] for ranks in parts]
        calls = [
            worker.set_visible_devices.remote(devices, each > 1)
            for worker, devices in zip(heads.workers, devices_of, strict=True)
        ]
        gather([heads.as_pending("choosing devices", calls)], timeout_s)
        leading = range(0, len(parts), each)
        return Engines(
            heads.select(leading), heads.select([i for i in range(len(parts)) if i not in leading]), timeout_s
        )

    def start_again(self, placement: Placement, engine: int) -> Group:
        """Start a new leader of an engine on one node, in place of the one that died; returns it, not built yet.

        The engine's other workers go on holding its further GPUs. Where their node has left, all of them are started on
        another one that has as many GPUs free. Raises NodeLost where none has, RunFailed where one does not start.
        """
        name, rank = self.leaders.name, self.leaders.reports[engine].rank
        n_gpus = len(placement.groups[name]) // len(self.leaders)
        ranks = range(rank, rank + n_gpus)
        try:
            worker = placement.restart_worker(name, rank)
        except NodeLost:
            worker = placement.move_workers(name, ranks).select([0])
        if n_gpus > 1:
            members = placement.groups[name].select(ranks)
            devices = [gpu for report in members.reports for gpu in report.ray_gpu_ids]
            call = worker.workers[0].set_visible_devices.remote(devices, False)
            gather([worker.as_pending("choosing devices", [call])], self.timeout_s)
        return worker

    @property
    def nnodes(self) -> int:
        """Nodes that each engine is on."""
        return 1 + len(self.followers) // len(self.leaders)

    def submit_build(
        self, target: str, follower: str, args_per_engine: Sequence[Sequence[Any]], environment: Mapping[str, str]
    ) -> list[PendingCall]:
        """Start building every engine: ``target`` at its leader, ``follower`` at its other parts.

        Both take the arguments of their engine and then their NodeSpan, None for an engine on one node. The parts of an
        engine wait for each other. Raises RunFailed when a worker does not answer.

        vLLM alone can listen at the port, so it is not held until then: where another program has taken it meanwhile,
        the leader's build fails with torch's line that has the port and EADDRINUSE, and the run, started again, has
        another port.
        """
        if not self.followers:
            alone = [(*args, None) for args in args_per_engine]
            return [self.leaders.submit_build(target, alone, environment=environment)]
        calls = [worker.free_port.remote() for worker in self.leaders.workers]
        ports = gather([self.leaders.as_pending("finding a port", calls)], self.timeout_s)[0]
        leading, following = [], []
        for args, report, port in zip(args_per_engine, self.leaders.reports, ports, strict=True):
            spans = [NodeSpan(self.nnodes, node_rank, report.ip, port) for node_rank in range(self.nnodes)]
            leading.append((*args, spans[0]))
            following += [(*args, span) for span in spans[1:]]
        return [
            self.leaders.submit_build(target, leading, environment=environment),
            self.followers.submit_build(follower, following, environment=environment),
        ]

    def bind(self) -> PendingCall:
        """Have followers serve, and all parts of an engine end as soon as one of them does; after the build.

        Returns the followers' calls, which end only when one fails. Raises RunFailed when a worker does not answer.
        """
        serving = self.followers.submit("serve", activity="following")
        if not serving.refs:
            return serving
        each = self.nnodes - 1
        follower_calls = [list(serving.refs[i : i + each]) for i in range(0, len(serving.refs), each)]
        lives = [life for worker in self.leaders.workers for life in [worker.block_until_end.remote()] * each]
        watching = [
            self.leaders.as_pending("watching followers", _watch_each(self.leaders, follower_calls)),
            self.followers.as_pending("watching leaders", _watch_each(self.followers, [[life] for life in lives])),
        ]
        gather(watching, self.timeout_s)
        return serving


def _watch_each(group: Group, calls: Sequence[list[Any]]) -> list[Any]:
    return [worker.end_after_any.remote(refs) for worker, refs in zip(group.workers, calls, strict=True)]


def _parts(group: Group, tensor_parallel_size: int) -> list[list[int]]:
    """Return ranks of every part of every engine: those on one node."""
    parts: list[list[int]] = []
    for first in range(0, len(group), tensor_parallel_size):
        by_node: dict[str, list[int]] = {}
        for rank in range(first, min(first + tensor_parallel_size, len(group))):
            by_node.setdefault(group.reports[rank].node_id, []).append(rank)
        parts += by_node.values()
        if len(group) % tensor_parallel_size or len({len(ranks) for ranks in parts}) > 1:
            counts = " + ".join(str(len(ranks)) for ranks in by_node.values())
            raise RunFailed(
                f"{group.name}: an engine of tensor_parallel_size={tensor_parallel_size} from rank {first} on has "
                f"{counts} GPUs on its nodes"
            )
    return parts


def require_engines_run(config: Config, groups: Mapping[str, Group]) -> None:
    """Raise ConfigError where vLLM is to run on a device that the installed build is not for."""
    for name, group in groups.items():
        if name != "actor" and getattr(config, name).engine_class.needs_vllm:
            for report in group.reports:
                require_device(report.device, str(report))
