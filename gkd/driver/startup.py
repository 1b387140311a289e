"""From checked inputs to running groups: starts all of them at the same time, then connects them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

from gkd.actor.group import ActorGroup
from gkd.cluster.workers.colocation import Colocation
from gkd.cluster.workers.engines import Engines, require_engines_run
from gkd.cluster.workers.group import Group, PendingCall, gather
from gkd.cluster.workers.placement import Placement
from gkd.config import Config
from gkd.config.transfer import choose_transfer
from gkd.data.stream import PromptStream
from gkd.driver.groups.engines import RolloutEngines
from gkd.driver.groups.scorers import Scorers
from gkd.driver.groups.weight_sync import WeightSync
from gkd.driver.inputs.find import Inputs
from gkd.driver.loop.parts import Parts
from gkd.driver.validation.held_out import Validation
from gkd.driver.validation.val_sets import ValSets
from gkd.rollout.dataset_answers import DatasetAnswers
from gkd.rollout.group import RolloutGroup
from gkd.scoring.client import ScoringClient

log = logging.getLogger("gkd")

ANNOUNCE_S = 60.0
"""How often a line states which workers models are still loaded for."""


def start(config: Config, inputs: Inputs, placement: Placement) -> Parts:
    """Build every worker, load every model, connect rollout to teacher and reference.

    ``config`` is what :func:`with_transfer` returned.
    Raises ConfigError where student and teacher do not fit together, RunFailed where a worker does not come up.
    """
    limit, groups = config.cluster.start_timeout_s, placement.groups
    require_engines_run(config, groups)
    engines = Engines.from_group(groups["rollout"], config.rollout.tensor_parallel_size, limit)
    rollout, samplers = engines.leaders, RolloutEngines(config, inputs, placement, engines)
    colocation = Colocation()
    actor = ActorGroup(groups["actor"], config, inputs.student, partial(placement.restart, "actor"), colocation)
    scorers = Scorers.from_groups(config, inputs, groups, rollout)
    builds: dict[str, Callable[[], list[PendingCall]]] = {
        "actor": lambda: [actor.submit_build()],
        "rollout": samplers.build,
        **scorers.builds(),
    }
    is_loaded = _build_workers(builds, groups, actor, limit)
    followers = [group_engines.bind() for group_engines in (engines, *scorers.engines.values())]
    clients = scorers.client_arguments(len(rollout))
    scorer_watch = scorers.watch(placement, clients)
    teachers = {name: ScoringClient(**arguments) for name, arguments in clients.items() if name.startswith("teacher")}
    for client in teachers.values():
        client.connect()
    rollout.control("pipeline.connect", clients, timeout_s=limit, activity="connecting to the models that score")
    require, restart_policy = placement.session.require_control, samplers.make_restart_policy(clients, scorer_watch)
    rollout_group = RolloutGroup(
        rollout, config, scorer_watch, colocation, followers, require, restart_policy, teachers
    )
    if config.cluster.offload is True:
        colocation.actor, colocation.scorers = actor, [scorers]
        colocation.samplers = [rollout_group] if "rollout" in config.groups_on_actor_gpus() else []
    sync = WeightSync(actor, rollout_group, groups["rollout"].reports, config)
    rollout_group.refresh = sync.refresh
    if not is_loaded:  # once engines that are to sleep meanwhile do
        gather([actor.submit_load()], limit, announce_s=ANNOUNCE_S)
    actor.read_sharing()
    # What is trained in 4 bits is not quite the model that the engines have read; what shards need shows at the first
    # push, which had better not come after a whole step; and only requests that begin with an adapter go on with the
    # next one.
    swaps_adapters = config.weights.adapter_only and config.schedule.in_flight
    if config.actor.lora.quantize or config.weights.transfer_class.shards or swaps_adapters:
        sync.push()
    answers = DatasetAnswers(inputs.model.eos_ids) if config.algorithm.is_supervised else None
    validation = Validation(config, inputs, rollout_group, actor, teachers, answers)
    val_sets = ValSets(config, inputs.val_sets, inputs.tokenizer, rollout_group, actor)
    stream = PromptStream(inputs.train.prompts, config.trainer.seed, config.data.train_weights)
    n_gpus = len({uuid for group in groups.values() for report in group.reports for uuid in report.gpu_uuids})
    return Parts(
        stream, rollout_group, actor, sync, validation, val_sets, n_gpus, inputs.model,
        groups["actor"].reports[0].device, answers=answers,
    )  # fmt: skip


def _build_workers(
    builds: Mapping[str, Callable[[], list[PendingCall]]], groups: Mapping[str, Group], actor: ActorGroup, limit: float
) -> bool:
    """Build all workers; engines load their models as they are built. Returns whether the actor has the student, too.

    It reads that beside the engines where none is on its GPUs: vLLM measures what is free, and some are to sleep first.
    """
    actor_gpus = {uuid for report in groups["actor"].reports for uuid in report.gpu_uuids}
    others = {
        uuid for name in builds if name != "actor" for report in groups[name].reports for uuid in report.gpu_uuids
    }
    in_waves, loading = waves({name: groups[name] for name in builds}), list[PendingCall]()
    for wave in in_waves:
        calls = {name: builds[name]() for name in wave}
        if "actor" in calls and not actor_gpus & others:
            gather(calls.pop("actor"), limit, announce_s=ANNOUNCE_S)
            loading = [actor.submit_load()]
        pending = [call for group_calls in calls.values() for call in group_calls]
        gather([*pending, *(loading if wave is in_waves[-1] else ())], limit, announce_s=ANNOUNCE_S)
    return bool(loading)


def waves(groups: Mapping[str, Group]) -> list[list[str]]:
    """Return which groups may start at the same time: those on one GPU one after the other, as vLLM measures what is
    free.

    Simulated GPUs have nothing that could be measured; and the actor takes no memory before it loads.
    """
    waves: list[list[str]] = [[]]
    for name, group in groups.items():
        gpus = {uuid for r in group.reports if r.device == "cuda" and name != "actor" for uuid in r.gpu_uuids}
        for wave in waves:
            others = {uuid for other in wave for r in groups[other].reports for uuid in r.gpu_uuids if other != "actor"}
            if not gpus & others:
                wave.append(name)
                break
        else:
            waves.append([name])
    return waves


def with_transfer(config: Config, groups: Mapping[str, Group]) -> Config:
    """Return the configuration with the way that weights take in place of ``auto``. Raises ConfigError for one that
    cannot.
    """
    name = config.weights.transfer
    way = choose_transfer(config.weights, config.rollout, groups["actor"].reports, groups["rollout"].reports)
    log.info("weights go from the actor to the engines by %s (weights.transfer=%s)", way, name)
    return config.with_settings({"weights.transfer": way})
