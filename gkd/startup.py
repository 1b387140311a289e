"""From checked inputs to running groups: starts all of them at the same time, then connects them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from gkd.actor.group import ActorGroup
from gkd.algorithms.top_k import top_k_for_validation, top_k_wanted
from gkd.cluster.group import Group, Pending, gather
from gkd.config import Config
from gkd.data.prompts import PromptStream
from gkd.inputs import Inputs
from gkd.rollout.group import RolloutGroup
from gkd.teacher.address import Key, external_addresses
from gkd.teacher.client import TeacherClient
from gkd.trainer import Parts
from gkd.validation import Validation
from gkd.vllm_engine import environment, require_device


@dataclass(frozen=True, slots=True)
class System:
    """Running parts, and how to ask the teacher."""

    parts: Parts
    teacher: TeacherClient


def start(config: Config, inputs: Inputs, groups: Mapping[str, Group]) -> System:
    """Build every worker, load every model, connect rollout to teacher.

    Raises ConfigError where student and teacher do not fit together, RunFailed where a worker does not come up.
    """
    limit = config.cluster.start_timeout_s
    _require_engines_run(config, groups)
    actor, rollout = groups["actor"], groups["rollout"].engines(config.rollout.tensor_parallel_size, limit)
    teacher = groups["teacher"].engines(config.teacher.tensor_parallel_size, limit) if "teacher" in groups else None
    key = _key(config, rollout, teacher)
    starting = [_build_actor(config, inputs, actor), _build_rollout(config, inputs, rollout)]
    if teacher is not None:
        starting.append(_build_teacher(config, inputs, teacher, key))
    gather(starting, limit)
    actor_group = ActorGroup(actor, config)
    actor_group.load()
    if teacher is None:
        addresses, serving = external_addresses(config.teacher), None
    else:
        addresses = teacher.control("address", timeout_s=limit)
        serving = teacher.submit("serve", what="serving")
    asking: dict[str, Any] = {
        "addresses": addresses,
        "tokenizer_hash": inputs.tokenizer_hash,
        "top_k": max(
            top_k_wanted(config, inputs.model.vocabulary), top_k_for_validation(config, inputs.model.vocabulary)
        ),
        "vocabulary": inputs.model.vocabulary,
        "max_length": inputs.max_length,
        "key": key,
        "n_clients": len(rollout),
        "request_timeout_s": config.teacher.request_timeout_s,
        "max_attempts": config.teacher.max_attempts,
        "heartbeat_s": config.teacher.heartbeat_s,
    }
    client = TeacherClient(**asking)
    client.connect()
    rollout.control("connect", asking, timeout_s=limit, what="connecting to the teacher")
    rollout_group = RolloutGroup(rollout, config, serving)
    validation = Validation(
        config,
        inputs.val.prompts,
        inputs.tokenizer,
        rollout_group,
        actor_group,
        top_k_for_validation(config, inputs.model.vocabulary),
    )
    stream = PromptStream(inputs.train.prompts, config.trainer.batch_size, config.trainer.seed)
    n_gpus = sum(len(group) for group in groups.values())
    parts = Parts(stream, rollout_group, actor_group, validation, teacher, n_gpus, inputs.model.vocabulary)
    return System(parts, client)


def _require_engines_run(config: Config, groups: Mapping[str, Group]) -> None:
    """Raise ConfigError where vLLM is to run on a device that the installed build is not for."""
    names = ["teacher"] if config.rollout.engine == "hf" else ["rollout", "teacher"]
    for report in [report for name in names if name in groups for report in groups[name].reports]:
        require_device(report.device, str(report))


def _build_actor(config: Config, inputs: Inputs, group: Group) -> Pending:
    world = len(group)
    args = [(config, inputs.student, rank, world, group.reports[rank].device) for rank in range(world)]
    return group.submit_build("gkd.actor.worker:ActorWorker", args)


def _build_rollout(config: Config, inputs: Inputs, group: Group) -> Pending:
    args = [
        (config, inputs.student, inputs.model, inputs.max_length, rank, group.reports[rank].device)
        for rank in range(len(group))
    ]
    return group.submit_build("gkd.rollout.worker:RolloutWorker", args, environment=_environment(group, config))


def _build_teacher(config: Config, inputs: Inputs, group: Group, key: Key | None) -> Pending:
    # A teacher that is this run's own takes exactly the sequences this run has; less cache is set aside for them.
    longest = config.teacher.max_model_len or inputs.max_length
    config = config.model_copy(update={"teacher": config.teacher.model_copy(update={"max_model_len": longest})})
    # Without a key everything is on this machine; with one, each server listens where the others can reach it.
    args = [
        (config, inputs.teacher, inputs.tokenizer_hash, report.device, report.ip if key else "127.0.0.1", key)
        for report in group.reports
    ]
    return group.submit_build("gkd.teacher.worker:TeacherWorker", args, environment=_environment(group, config))


def _environment(group: Group, config: Config) -> dict[str, str]:
    return environment(group.reports[0].device, config.cluster.cpu_threads)


def _key(config: Config, rollout: Group, teacher: Group | None) -> Key | None:
    """The user's key; without one, one of this run's own where its teacher and its clients are on several machines."""
    if config.teacher.key_file is not None:
        return Key.load(config.teacher.key_file)
    if teacher is None:
        return None
    addresses = {report.ip for group in (rollout, teacher) for report in group.reports}
    addresses.add(ray.util.get_node_ip_address())
    return Key.generate() if len(addresses) > 1 else None
