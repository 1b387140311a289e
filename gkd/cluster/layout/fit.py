"""Whether a layout fits on the nodes there are; if not, why, in one line, and what would.

That is the nearest layout, as overrides to paste, or, where it is allowed to, one of conf/placement in which groups
share GPUs (``placement=auto``). Whether these then hold all groups at once or the actor is offloaded is decided later,
by memory (cluster.offload).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from gkd.cluster.gpu import range_text
from gkd.cluster.layout.nodes import GroupRequest, Node, group_requests, solve
from gkd.config import SECTION_OF, Config, Engine, load, parse_gpus
from gkd.config.loading import CONF_DIR, read_yaml
from gkd.errors import ConfigError

MOST_MIXES = 100_000  # of smaller groups, looked at in half a second
LAYOUTS = {4: "4gpu", 3: "3gpu", 2: "2gpu", 1: "single_gpu"}
"""Layouts in which groups share GPUs, by the number of GPUs of one node, the most first."""
TRIES = 500  # to place one of them


def require_fit(
    requests: Sequence[GroupRequest], nodes: Sequence[Node], cpus_per_worker: float, hint: str = ""
) -> None:
    """Raise ConfigError, in one line, when the groups do not fit even on the idle cluster.

    ``hint`` is appended: what else the user could do.
    """
    idle = [node.as_idle() for node in nodes]
    if solve(requests, idle, cpus_per_worker) is not None:
        return
    parts = [_explain_misfit(requests, idle, cpus_per_worker), _describe_nearest(requests, idle, cpus_per_worker)]
    raise ConfigError("; ".join([*parts, hint] if hint else parts))


def request_text(requests: Sequence[GroupRequest], cpus_per_worker: float | None = None) -> str:
    """Return ``actor 1, rollout 3 on each of 2 nodes, teacher 4 = 11 GPUs``, with CPUs where a worker's are given."""
    parts = []
    for request in requests:
        where = f" on each of {request.nnodes} nodes" if request.nnodes > 1 else ""
        exact = f" (GPUs {' and '.join(map(range_text, request.ranges))})" if request.ranges else ""
        colocated = "".join(f" with {other.group} on {len(other.positions)} of them" for other in request.colocated)
        parts.append(f"{request.group} {request.n_gpus}{where}{exact}{colocated}")
    total = sum(request.total for request in requests)
    text = f"{', '.join(parts)} = {total} GPU{'s' * (total != 1)}"
    n_cpus = sum(request.workers_per_node * request.nnodes for request in requests) * (cpus_per_worker or 0.0)
    return text if cpus_per_worker is None else f"{text} and {n_cpus:g} CPUs"


def gpus_text(nodes: Sequence[Node]) -> str:
    """Return ``8 on 1 node``, ``8 on each of 4 nodes`` or ``8+4 on 2 nodes``."""
    counts = [len(node.gpus) for node in nodes if node.gpus]
    if len(counts) <= 1:
        return f"{sum(counts)} on 1 node"
    if len(set(counts)) == 1:
        return f"{counts[0]} on each of {len(counts)} nodes"
    return f"{'+'.join(map(str, counts))} on {len(counts)} nodes"


def _explain_misfit(requests: Sequence[GroupRequest], idle: Sequence[Node], cpus: float) -> str:
    """Return what is needed and what there is."""
    for request in requests:
        for gpus in request.ranges:
            if not any(set(gpus) <= set(node.gpus) for node in idle):
                ranges = "; ".join(sorted({f"{range_text(node.gpus)}" for node in idle if node.gpus})) or "none"
                return f"{_range_override(request)} is beyond this cluster: a node has the GPUs {ranges}"
    if solve(requests, idle, 0.0) is not None:
        have = "+".join(f"{node.cpus:g}" for node in idle)
        return (
            f"asked for {request_text(requests, cpus)} (cluster.cpus_per_worker={cpus:g}); "
            f"this cluster has {have} CPUs on {len(idle)} node{'s' * (len(idle) != 1)}"
        )
    return f"asked for {request_text(requests)}; this cluster has {gpus_text(idle)}"


def _describe_nearest(requests: Sequence[GroupRequest], idle: Sequence[Node], cpus: float) -> str:
    if solve(requests, idle, 0.0) is not None:  # only the CPUs are short
        return f"nearest that fits: {_cpu_override(requests, idle)}"
    closest = find_nearest_layout(requests, idle, cpus)
    words = [] if closest is None else _overrides(requests, closest)
    if closest is None and (closest := find_nearest_layout(requests, idle, 0.0)) is not None:
        words = [*_overrides(requests, closest), _cpu_override(closest, idle)]
    if closest is None:
        has_teacher = any(request.section == "teacher" for request in requests)
        external = " (an external teacher, teacher.server_ip, needs none here)" if has_teacher else ""
        widths = [request.tensor_parallel_size for request in requests]
        wide = max([*widths, *(other.tensor_parallel_size for request in requests for other in request.colocated)])
        need = "a GPU of its own" if wide == 1 else f"GPUs of its own, some as many as an engine has ({wide})"
        sharing = _suggest_sharing_layout(requests, idle) if wide == 1 else ""
        groups = f"{len(requests)} group{'s' * (len(requests) != 1)}"
        return f"no layout of {groups} fits: each needs {need}{external}{sharing}"
    return f"nearest that fits: {' '.join(words)}"


def _suggest_sharing_layout(requests: Sequence[GroupRequest], idle: Sequence[Node]) -> str:
    """Return the layout in conf/placement whose groups share the GPUs of the largest node, where these are fewer.

    Ranges, which may be typed, would stay beside it, and no setting leaves them to a placement.
    """
    most = max((len(node.gpus) for node in idle), default=0)
    if not 0 < most < len(requests):
        return ""
    ranges = [_range_override(request).partition("=")[0] for request in requests if request.ranges]
    without = f" in place of {' and '.join(ranges)}" if ranges else ""
    return f"; placement={LAYOUTS[most]}{without} lets them share"


def _range_override(request: GroupRequest) -> str:
    if request.by_node:
        return f"{request.section}.gpus_by_node=[{','.join(map(range_text, request.by_node))}]"
    return f"{request.section}.gpus={range_text(request.gpus or ())}"


def _cpu_override(requests: Sequence[GroupRequest], idle: Sequence[Node]) -> str:
    """Return the most CPUs a worker can have when the GPUs fit, rounded down to hundredths."""
    most = sum(request.workers_per_node for request in requests)  # that can be on one node
    shares = {math.floor(node.cpus / k * 100) / 100 for node in idle for k in range(1, most + 1)}
    fitting = (share for share in sorted(shares, reverse=True) if solve(requests, idle, share) is not None)
    return f"cluster.cpus_per_worker={next(fitting, 0.01):g}"


def _overrides(requests: Sequence[GroupRequest], closest: Sequence[GroupRequest]) -> list[str]:
    words: list[str] = []
    for old, new in zip(requests, closest, strict=True):
        if old.ranges and not new.ranges:
            words.append(f"{old.section}.{'gpus_by_node' if old.by_node else 'gpus'}=null")
        words.append(f"{old.section}.n_gpus_per_node={new.n_gpus}")
        if new.nnodes != old.nnodes:
            words.append(f"{old.section}.nnodes={new.nnodes}")
        for before, after in zip(old.colocated, new.colocated, strict=True):
            section = SECTION_OF[before.group]
            if before.gpus != after.gpus:
                words.append(f"{section}.gpus=null")
            if before.gpus != after.gpus or len(before.positions) != len(after.positions):
                words.append(f"{section}.n_gpus_per_node={len(after.positions)}")
            if before.nnodes != after.nnodes:
                words.append(f"{section}.nnodes={after.nnodes}")
    return words


def find_nearest_layout(
    requests: Sequence[GroupRequest], nodes: Sequence[Node], cpus_per_worker: float
) -> list[GroupRequest] | None:
    """Return the layout that fits and gives up least: GPUs first, then exact ranges, then nodes; None without one.

    Engines stay as wide as they are, on one node or on as many GPUs of each node as before. Colocated groups are on as
    many of their host's first GPUs as before, or on all that are left. Among equals the later groups keep theirs,
    because the teacher and the rollout are what an actor of few GPUs waits for.
    """
    capacity = sum(node.free_gpus for node in nodes)
    options = [_list_smaller(request, nodes) for request in requests]
    if math.prod(map(len, options)) > MOST_MIXES:
        options = [_list_smaller(request, nodes, few=True) for request in requests]

    def count_given_up(mix: tuple[GroupRequest, ...]) -> tuple[object, ...]:
        return (
            -sum(new.total for new in mix),
            sum(bool(old.ranges and not new.ranges) for old, new in zip(requests, mix, strict=True)),
            sum(old.nnodes != new.nnodes for old, new in zip(requests, mix, strict=True)),
            tuple(-new.total for new in reversed(mix)),
        )

    fitting = (mix for mix in itertools.product(*options) if sum(new.total for new in mix) <= capacity)
    for mix in sorted(fitting, key=count_given_up):
        if solve(mix, nodes, cpus_per_worker, TRIES) is not None:
            return list(mix)
    return None


def _list_smaller(request: GroupRequest, nodes: Sequence[Node], few: bool = False) -> list[GroupRequest]:
    """Return the request itself, where it could be met, and smaller ones: all on up to four nodes, a selection on more.

    ``few``: a selection in any case, with halves of its GPUs.
    """
    most = min(request.nnodes, len(nodes))
    step = min(request.tensor_parallel_size, request.n_gpus)
    largest = min(request.n_gpus, max((len(node.gpus) for node in nodes), default=0)) // step * step
    sizes = list(range(step, largest + 1, step))
    if few:
        sizes = sorted({largest, *(size for i in range(8) if (size := step << i) < largest)} - {0})
    if most <= 4 and not few:
        shapes = {(n, k) for n in sizes for k in range(1, most + 1)}
    else:  # fewer GPUs on all nodes, or all GPUs on fewer nodes
        fewer = {most - (1 << d) for d in range(most.bit_length())} | {most >> d for d in range(most.bit_length())}
        shapes = {(n, most) for n in sizes} | {(largest, k) for k in fewer if k > 0 and largest > 0}
    width = request.tensor_parallel_size
    whole = sorted((n, k) for n, k in shapes if n * k % width == 0)  # engines
    without_ranges = replace(request, gpus=None, by_node=())
    smaller = [_shrink(without_ranges, n, k) for n, k in whole]
    if request.by_node:
        smaller.append(request)
    elif request.gpus is not None and any(set(request.gpus) <= set(node.gpus) for node in nodes):
        counts = sorted({k for _, k in shapes} | {1})
        smaller += [_shrink(request, request.n_gpus, k) for k in counts if request.n_gpus * k % width == 0]
    return [option for option in smaller if option is not None]


def _shrink(request: GroupRequest, n_gpus: int, nnodes: int) -> GroupRequest | None:
    """Return the request with so many GPUs on so many nodes, and colocated groups within; None without an engine's."""
    colocated = []
    for other in request.colocated:
        step = min(other.tensor_parallel_size, len(other.positions))
        n_own, nodes = min(n_gpus, len(other.positions)) // step * step, min(nnodes, other.nnodes)
        if n_own == 0 or n_own * nodes % other.tensor_parallel_size:
            return None
        within = other if request.ranges else replace(other, positions=tuple(range(n_own)), gpus=None)
        colocated.append(replace(within, nnodes=nodes))
    return replace(request, n_gpus=n_gpus, nnodes=nnodes, colocated=tuple(colocated))


def share_gpus(config: Config, nodes: Sequence[Node]) -> Config:
    """Return ``config`` with a layout in which groups share GPUs, where it takes that and may (``cluster.share_gpus``).

    Ranges of a placement are counted among the GPUs that there are (:func:`has_counted_ranges`). The same where its
    groups fit as they are, where a pool's own settings name which or how many GPUs it has, and where no layout fits.
    ``nodes`` are taken to be idle.
    """
    if fits(config, nodes):
        return config
    indices = max((sorted(node.gpus) for node in nodes), key=len, default=[])  # of the node that has most
    layouts = [config] if has_counted_ranges(config) else []
    if may_share(config):
        layouts = [_with_layout(config, name) for n_gpus, name in LAYOUTS.items() if n_gpus <= len(indices)]
    for layout in layouts:
        if (changed := _count_among(layout, indices)) is not None and fits(changed, nodes):
            return changed
    return config


def has_counted_ranges(config: Config) -> bool:
    """Return whether groups have exact GPUs, all by the placement's file: it counts GPUs, where a user names them."""
    ranges = {section: pool.ranges() for section, pool in config.pools() if pool.ranges() is not None}
    layout = read_yaml(str(CONF_DIR / "placement" / f"{config.placement}.yaml"))
    return bool(ranges) and all(
        gpu_ranges == [parse_gpus(layout.get(section, {}).get("gpus"))] for section, gpu_ranges in ranges.items()
    )


def _count_among(config: Config, indices: Sequence[int]) -> Config | None:
    """Return ``config`` with ``indices`` in place of GPUs 0, 1, ... of its ranges; None where these are too few."""
    tree = config.model_dump()
    for section, pool in config.pools():
        if pool.gpus is not None:
            if max(pool.gpus) >= len(indices):
                return None
            tree[section]["gpus"] = [indices[i] for i in pool.gpus]
    return load(tree)


def fits(config: Config, nodes: Sequence[Node]) -> bool:
    """Return whether its groups have room on these nodes with nobody on them."""
    return solve(group_requests(config), [node.as_idle() for node in nodes], 0.0) is not None


def may_share(config: Config) -> bool:
    """Return whether sharing is allowed, and no setting states where groups go."""
    return config.cluster.share_gpus and all(
        pool.n_workers == 1
        and pool.ranges() is None
        and pool.colocate_with is None
        and not (isinstance(pool, Engine) and pool.tensor_parallel_size > 1)
        for _, pool in config.pools()
    )


def _with_layout(config: Config, name: str) -> Config:
    """Return ``config`` with the pools of a layout. Shares of memory that differ from the default stay as they are."""
    tree, layout = config.model_dump(), read_yaml(str(CONF_DIR / "placement" / f"{name}.yaml"))
    for section, _ in config.pools():
        settings, fields = tree[section], type(getattr(config, section)).model_fields
        # What is set to something else already stays.
        pool = {k: v for k, v in layout.get(section, {}).items() if settings[k] in (fields[k].default, None)}
        if "gpus" in pool:
            pool |= {"n_gpus_per_node": None}
        tree[section] |= pool
    if config.plan.nodes is None:
        tree["plan"] |= layout["plan"]
    return load(tree)
