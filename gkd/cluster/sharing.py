"""Fewer GPUs than groups: which of the shared layouts in conf/placement ``placement=auto`` then takes.

Whether groups on one GPU are there side by side or take turns is decided later, by memory (cluster.offload).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gkd.cluster.layout import Node, requests_of, solve
from gkd.config import Config, Engine, load, parse_gpus
from gkd.config.compose import CONF_DIR
from gkd.config.file import read_yaml

LAYOUTS = {4: "4gpu", 3: "3gpu", 2: "2gpu", 1: "single_gpu"}
"""By the number of GPUs of one node, the most first."""


def shared(config: Config, nodes: Sequence[Node]) -> Config:
    """``config`` with a layout in which groups share GPUs, where ``cluster.share_gpus`` allows it and it takes that.

    The same where its groups fit as they are, where a pool's own settings say which or how many GPUs it has, and where
    no layout fits. ``nodes`` are taken to be idle.
    """
    if not may_share(config) or fits(config, nodes):
        return config
    indices = max((sorted(node.gpus) for node in nodes), key=len, default=[])  # of the node that has most
    for n_gpus, name in LAYOUTS.items():
        if n_gpus <= len(indices) and fits(changed := _with_layout(config, name, indices), nodes):
            return changed
    return config


def fits(config: Config, nodes: Sequence[Node]) -> bool:
    """Whether its groups have room on these nodes with nobody on them."""
    return solve(requests_of(config), [node.idle() for node in nodes], 0.0) is not None


def may_share(config: Config) -> bool:
    """Whether sharing is allowed, and no setting says where groups go."""
    return config.cluster.share_gpus and all(
        pool.n_workers == 1
        and pool.ranges() is None
        and pool.colocate_with is None
        and not (isinstance(pool, Engine) and pool.tensor_parallel_size > 1)
        for _, pool in config.pools()
    )


def _with_layout(config: Config, name: str, indices: Sequence[int]) -> Config:
    """``config`` with the pools of a layout; its GPUs 0, 1, ... are ``indices``. Shares of memory that differ from the
    default are the user's, and stay.
    """
    tree, layout = config.model_dump(), read_yaml(str(CONF_DIR / "placement" / f"{name}.yaml"))
    for section, _ in config.pools():
        wanted = _own_settings(tree[section], layout.get(section, {}), type(getattr(config, section)).model_fields)
        if (gpus := parse_gpus(wanted.get("gpus"))) is not None:
            wanted |= {"gpus": [indices[i] for i in gpus], "n_gpus_per_node": None}
        tree[section] |= wanted
    if config.plan.nodes is None:
        tree["plan"] |= layout["plan"]
    return load(tree)


def _own_settings(now: Mapping[str, Any], layout: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """What of a layout's settings is not set to something else already."""
    return {key: value for key, value in layout.items() if now[key] in (fields[key].default, None)}
