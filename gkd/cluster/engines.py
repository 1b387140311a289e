"""Engines over the workers of a group: who leads, which GPUs it sees, and the parts of an engine on further nodes.

An engine of several GPUs on one node is one worker that sees all of them, while the other workers keep theirs reserved.
One that spans nodes has such a worker on each: the first leads, the others *follow*, with vLLM's processes of their
GPUs and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gkd.cluster.group import Group, Pending, gather
from gkd.errors import RunFailed
from gkd.vllm_engine import Span


@dataclass(frozen=True)
class Engines:
    """The engines of a group; ranks of ``leaders`` count them."""

    leaders: Group
    followers: Group
    """Parts on further nodes, engine by engine; none where every engine keeps to a node."""
    spans: tuple[Span | None, ...]
    """Of the leaders; None for an engine on one node."""

    @staticmethod
    def of(group: Group, tensor_parallel_size: int, timeout_s: float) -> Engines:
        """Make engines of so many consecutive workers each. To be called after the check, before any build.

        Raises RunFailed where parts of engines have different numbers of GPUs, or a worker does not answer.
        """
        if tensor_parallel_size == 1:
            return Engines(group, group.only([]), (None,) * len(group))
        engines = [_parts(group, first, tensor_parallel_size) for first in range(0, len(group), tensor_parallel_size)]
        parts = [ranks for engine in engines for ranks in engine]
        heads = group.only([ranks[0] for ranks in parts])
        seen = [[gpu for rank in ranks for gpu in group.reports[rank].ray_gpu_ids] for ranks in parts]
        refs = [worker.lead.remote(devices) for worker, devices in zip(heads.workers, seen, strict=True)]
        told = gather([heads.pending("choosing devices", refs)], timeout_s)[0]
        ports = {ranks[0]: port for ranks, port in zip(parts, told, strict=True)}
        first = [engine[0][0] for engine in engines]
        return Engines(
            group.only(first),
            group.only([ranks[0] for engine in engines for ranks in engine[1:]]),
            tuple(
                Span(len(engine), 0, group.reports[rank].ip, ports[rank]) if len(engine) > 1 else None
                for engine, rank in zip(engines, first, strict=True)
            ),
        )

    def submit_build(
        self, target: str, follower: str, args_per_engine: Sequence[Sequence[Any]], environment: Mapping[str, str]
    ) -> list[Pending]:
        """Start building every engine: ``target`` at its leader, ``follower`` at its other parts.

        Both take the arguments of their engine and then their Span. The parts of an engine wait for each other.
        """
        leading = [(*args, span) for args, span in zip(args_per_engine, self.spans, strict=True)]
        following = [
            (*args, replace(span, node_rank=node_rank))
            for args, span in zip(args_per_engine, self.spans, strict=True)
            if span is not None
            for node_rank in range(1, span.nnodes)
        ]
        calls = [self.leaders.submit_build(target, leading, environment=environment)]
        if following:
            calls.append(self.followers.submit_build(follower, following, environment=environment))
        return calls

    def bind(self, timeout_s: float) -> Pending:
        """Have followers serve, and every leader's process end as soon as one of its followers stops. After the build.

        Returns the followers' calls, which end only when one fails. Raises RunFailed when a leader does not answer.
        """
        serving = self.followers.submit("serve", what="following")
        if serving.refs:
            each = len(serving.refs) // len(self.leaders)
            parts = [list(serving.refs[i : i + each]) for i in range(0, len(serving.refs), each)]
            calls = [worker.end_with.remote(own) for worker, own in zip(self.leaders.workers, parts, strict=True)]
            gather([self.leaders.pending("watching the other parts of an engine", calls)], timeout_s)
        return serving


def _parts(group: Group, first: int, tensor_parallel_size: int) -> list[list[int]]:
    """Ranks of the engine that begins at ``first``, node by node."""
    by_node: dict[str, list[int]] = {}
    for rank in range(first, min(first + tensor_parallel_size, len(group))):
        by_node.setdefault(group.reports[rank].node_id, []).append(rank)
    parts = list(by_node.values())
    if sum(map(len, parts)) < tensor_parallel_size or len({len(ranks) for ranks in parts}) > 1:
        told = " + ".join(str(len(ranks)) for ranks in parts)
        raise RunFailed(
            f"{group.name}: tensor_parallel_size={tensor_parallel_size} has {told} GPUs on its nodes from rank {first}"
        )
    return parts
