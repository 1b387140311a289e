"""Which node gets which group with how many GPUs. Pure Python: works without Ray, on a login node, in microseconds.

Groups are placed in order (actor, rollout, teacher). A group spans ``nnodes`` distinct nodes with the same number of
GPUs on each; groups share a node while its GPUs and CPUs last. Nodes in the same state are interchangeable, so the
search tries one choice per *kind* of node instead of one per node, and stays small on clusters of many equal nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gkd.config import SECTION_OF, Config, Pool

MOST_STATES = 10_000  # of nodes that all differ, a second or two


@dataclass(frozen=True)
class Node:
    """A node: every GPU it has by index, and how many GPUs and CPUs nobody holds now."""

    id: str
    name: str
    gpus: tuple[int, ...]
    cpus: float
    free_gpus: int = -1
    free_cpus: float = -1.0

    def as_idle(self) -> Node:
        """Return the same node with nobody on it."""
        return replace(self, free_gpus=len(self.gpus), free_cpus=self.cpus)


@dataclass(frozen=True)
class ColocatedGroup:
    """A group on GPUs of another: those at ``positions`` among the other's of a node, on ``nnodes`` of its nodes."""

    group: str
    positions: tuple[int, ...]
    nnodes: int
    gpus: tuple[int, ...] | None = None
    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class GroupRequest:
    """The GPUs that one group needs: ``n_gpus`` on each of ``nnodes`` nodes; ``gpus`` are exact indices, None any.

    ``by_node`` has, instead of ``gpus``, exact indices for each node. ``colocated`` are the groups that share its GPUs.
    ``others_per_gpu``: actors that engines start by themselves, as many on each GPU, which take as much of it as a
    worker.
    """

    group: str
    n_gpus: int
    nnodes: int
    gpus: tuple[int, ...] | None = None
    tensor_parallel_size: int = 1
    colocated: tuple[ColocatedGroup, ...] = ()
    by_node: tuple[tuple[int, ...], ...] = ()
    others_per_gpu: int = 0

    @property
    def section(self) -> str:
        """The section of settings that the group has its GPUs by."""
        return SECTION_OF[self.group]

    @property
    def ranges(self) -> tuple[tuple[int, ...], ...]:
        """Exact indices that some node must have; none where any will do."""
        return self.by_node or (() if self.gpus is None else (self.gpus,))

    def parts(self) -> list[GroupRequest]:
        """Return the request, or one for every different range of ``by_node``, which are to be on different nodes."""
        if not self.by_node:
            return [self]
        different = dict.fromkeys(self.by_node)
        return [replace(self, gpus=gpus, nnodes=self.by_node.count(gpus)) for gpus in different]

    @property
    def n_colocated(self) -> int:
        """Workers of colocated groups on each node."""
        return sum(position < self.n_gpus for other in self.colocated for position in other.positions)

    @property
    def workers_per_node(self) -> int:
        """Workers on each node, those of colocated groups among them."""
        return self.n_gpus + self.n_colocated

    @property
    def workers_per_gpu(self) -> int:
        """Most workers that share one of its GPUs."""
        colocated = max((sum(p in other.positions for other in self.colocated) for p in range(self.n_gpus)), default=0)
        return 1 + colocated + self.others_per_gpu

    @property
    def total(self) -> int:
        """GPUs over all nodes, which is the number of the group's workers."""
        return self.n_gpus * self.nnodes


@dataclass(frozen=True)
class Slot:
    """``n_gpus`` GPUs of one node for one group; ``gpus`` are the exact ones, None any; ``n_colocated`` workers
    of other groups share them.
    """

    group: str
    node_id: str
    n_gpus: int
    gpus: tuple[int, ...] | None
    n_colocated: int = 0


@dataclass
class _NodeState:
    """A node while groups are being put on it."""

    node: Node
    free_gpus: int
    free_cpus: float
    taken_gpus: frozenset[int] = field(default_factory=frozenset)
    groups: frozenset[str] = field(default_factory=frozenset)  # only those with another range on each node

    def kind(self) -> tuple[object, ...]:
        return (self.node.gpus, self.free_gpus, self.free_cpus, self.taken_gpus, self.groups)

    def can_host(self, request: GroupRequest, cpus: float) -> bool:
        if request.group in self.groups:
            return False
        if self.free_gpus < request.n_gpus or self.free_cpus + 1e-6 < cpus * request.workers_per_node:
            return False
        return request.gpus is None or (
            set(request.gpus) <= set(self.node.gpus) and not self.taken_gpus & set(request.gpus)
        )

    def with_group(self, request: GroupRequest, cpus: float) -> _NodeState:
        return _NodeState(
            self.node,
            self.free_gpus - request.n_gpus,
            self.free_cpus - cpus * request.workers_per_node,
            self.taken_gpus | frozenset(request.gpus or ()),
            self.groups | {request.group} if request.by_node else self.groups,
        )


def make_idle_nodes(gpus_of_nodes: Sequence[int]) -> list[Node]:
    """Return nodes with so many GPUs each, of which nobody has any."""
    return [Node(str(i), str(i), tuple(range(n)), 0.0).as_idle() for i, n in enumerate(gpus_of_nodes)]


def group_requests(config: Config) -> list[GroupRequest]:
    """Return what the groups need, in the order GPUs are handed out; colocated ones with their hosts."""
    hosts, pools = config.hosts(), config.groups()
    return [
        GroupRequest(
            group,
            pool.n_gpus_per_node,
            pool.nnodes,
            _indices(pool),
            pool.width,
            tuple(_colocated_group(guest, pools[guest], pool) for guest, host in hosts.items() if host == group),
            tuple(map(tuple, pool.gpus_by_node or ())),
            int(config.weights.transfer_class.ray_executor),
        )
        for group, pool in pools.items()
        if group not in hosts
    ]


def _colocated_group(group: str, pool: Pool, host: Pool) -> ColocatedGroup:
    positions: Sequence[int] = range(pool.n_gpus_per_node)
    if pool.gpus is not None and host.gpus is not None:
        positions = [host.gpus.index(index) for index in pool.gpus]
    return ColocatedGroup(group, tuple(positions), pool.nnodes, _indices(pool), pool.width)


def _indices(pool: Pool) -> tuple[int, ...] | None:
    return None if pool.gpus is None else tuple(pool.gpus)


def solve(
    requests: Sequence[GroupRequest], nodes: Sequence[Node], cpus_per_worker: float, tries: int = MOST_STATES
) -> list[Slot] | None:
    """Place every group on nodes' free GPUs and CPUs, earlier nodes first; None when that is impossible.

    Of clusters on which it is hard to find out, None also when none of the first ``tries`` did it.
    Slots come in the order of ``requests``, and of nodes within a group, so ranks follow from it.
    """
    parts = [part for request in requests for part in request.parts()]
    enough = cpus_per_worker * sum(part.workers_per_node for part in parts)  # of CPUs more make no difference
    states = [_NodeState(node, node.free_gpus, min(node.free_cpus, enough)) for node in nodes]
    placed = _Search(cpus_per_worker, tries).place(parts, states)
    if placed is None:
        return None
    places_by_group: dict[str, list[tuple[int, GroupRequest]]] = {}
    for part, positions in zip(parts, placed, strict=True):
        places_by_group.setdefault(part.group, []).extend((position, part) for position in positions)
    return [
        Slot(part.group, nodes[position].id, part.n_gpus, part.gpus, part.n_colocated)
        for places in places_by_group.values()
        for position, part in sorted(places, key=lambda place: place[0])
    ]


@dataclass
class _Search:
    """Depth first, with ``left`` choices at most; ``dead`` remembers those that lead nowhere."""

    cpus: float
    left: int
    dead: set[object] = field(default_factory=set)

    def place(self, requests: list[GroupRequest], states: list[_NodeState]) -> list[list[int]] | None:
        """Return positions of the nodes of every request, or None."""
        if not requests:
            return []
        key = (len(requests), frozenset(Counter(s.kind() for s in states).items()))
        if key in self.dead:
            return None
        if not _lacks_room(requests, states, self.cpus):
            for positions in _choices(requests[0], states, self.cpus):
                self.left -= 1
                if self.left < 0:
                    return None
                position_set = set(positions)
                after = [s.with_group(requests[0], self.cpus) if i in position_set else s for i, s in enumerate(states)]
                rest = self.place(requests[1:], after)
                if rest is not None:
                    return [positions, *rest]
        self.dead.add(key)
        return None


def _lacks_room(requests: Sequence[GroupRequest], states: Sequence[_NodeState], cpus: float) -> bool:
    """Return whether counting alone shows that there is no room: each bound holds of every placing, so None is lost."""
    for request in requests:
        if sum(state.can_host(request, cpus) for state in states) < request.nnodes:
            return True
    gpus_free = [(float(request.n_gpus), request.nnodes) for request in requests]
    cpus_free = [(cpus * request.workers_per_node, request.nnodes) for request in requests]
    return _exceeds(gpus_free, [state.free_gpus for state in states]) or _exceeds(
        cpus_free, [state.free_cpus + 1e-6 for state in states]
    )


def _exceeds(pieces: Sequence[tuple[float, int]], free: Sequence[float]) -> bool:
    """Return whether pieces (size, number) are more than fit: of those of a size or larger, and in all."""
    if sum(size * number for size, number in pieces) > sum(free):
        return True
    return any(
        sum(number for other, number in pieces if other >= size) > sum(n_free // size for n_free in free)
        for size in {size for size, _ in pieces if size > 0}
    )


def _choices(request: GroupRequest, states: list[_NodeState], cpus: float) -> Iterator[list[int]]:
    """Yield sets of ``request.nnodes`` nodes that can host the group, one per mix of kinds, the earliest first."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for position, state in enumerate(states):
        if state.can_host(request, cpus):
            kinds.setdefault(state.kind(), []).append(position)

    def mixes(members: list[list[int]], n_remaining: int) -> Iterator[list[int]]:
        if n_remaining == 0:
            yield []
        elif sum(map(len, members)) >= n_remaining:
            for count in range(min(n_remaining, len(members[0])), -1, -1):
                for rest in mixes(members[1:], n_remaining - count):
                    yield members[0][:count] + rest

    yield from mixes(list(kinds.values()), request.nnodes)


def choose_devices(slots: Sequence[Slot], available: Mapping[str, Sequence[int]]) -> list[list[int]] | str:
    """Return device indices for every slot out of those ``available`` on each node (by node id).

    Exact slots get their own; the others the lowest that no exact slot of the node names, in the order of ``slots``.
    Returns, instead of the devices, the name of what is missing when it cannot be done.
    """
    named = {(slot.node_id, index) for slot in slots for index in slot.gpus or ()}
    spare = {
        node_id: sorted(index for index in indices if (node_id, index) not in named)
        for node_id, indices in available.items()
    }
    devices: list[list[int]] = []
    for slot in slots:
        if slot.gpus is not None:
            missing = sorted(set(slot.gpus) - set(available.get(slot.node_id, ())))
            if missing:
                return f"GPU {', '.join(map(str, missing))} that {slot.group} asks for"
            devices.append(list(slot.gpus))
            continue
        free = spare.get(slot.node_id, [])
        if len(free) < slot.n_gpus:
            return f"{slot.n_gpus - len(free)} more GPUs for {slot.group}"
        devices.append(free[: slot.n_gpus])
        spare[slot.node_id] = free[slot.n_gpus :]
    return devices
